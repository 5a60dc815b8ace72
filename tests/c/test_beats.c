/* Signs of life over a store in memory: two ranks hear each other; a store that keeps a thread, or
 * fails, keeps nobody else. */
#define _GNU_SOURCE
#include "check.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "comm/beats.h"

#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

#define N_RANKS 3
#define PERIOD_NS (FC_NS_PER_S / 200)

typedef struct store {
    pthread_mutex_t lock;
    char words[N_RANKS][FC_BEATS_WORDS];
    _Atomic int n_sets, n_gets, n_released;
    _Atomic bool hangs, fails;
} store;

static void answer(store *s)
{
    while (atomic_load(&s->hangs)) {
        (void)usleep(1000);
    }
}

static fc_status set(void *context, int rank, const char *words)
{
    store *s = context;

    answer(s);
    if (atomic_load(&s->fails)) {
        return fc_fail(FC_ERR_GROUP, "no store");
    }
    (void)pthread_mutex_lock(&s->lock);
    (void)snprintf(s->words[rank], FC_BEATS_WORDS, "%s", words);
    (void)pthread_mutex_unlock(&s->lock);
    atomic_fetch_add(&s->n_sets, 1);
    return FC_OK;
}

static fc_status get(void *context, int rank, char *words)
{
    store *s = context;

    answer(s);
    atomic_fetch_add(&s->n_gets, 1);
    (void)pthread_mutex_lock(&s->lock);
    (void)snprintf(words, FC_BEATS_WORDS, "%s", s->words[rank]);
    (void)pthread_mutex_unlock(&s->lock);
    return FC_OK;
}

static void release(void *context)
{
    atomic_fetch_add(&((store *)context)->n_released, 1);
}

static store *make_store(void)
{
    store *s = calloc(1, sizeof(*s));

    CHECK(s != NULL && pthread_mutex_init(&s->lock, NULL) == 0);
    return s;
}

static fc_beats *start(store *s, int rank)
{
    const fc_beats_ops ops = {s, set, get, release};
    fc_beats *beats = NULL;

    CHECK_EQ(fc_beats_start(&ops, rank, PERIOD_NS, &beats), FC_OK);
    return beats;
}

/* Up to 10 s, until there is a sign that is newer, or with these words. */
static fc_beat await_beat(fc_beats *beats, int rank, int64_t newer_than_ns, const char *words)
{
    const int64_t deadline_ns = fc_deadline_ns(10 * FC_NS_PER_S);
    fc_beat found = fc_beats_heard(beats, rank);

    while (fc_now_ns() < deadline_ns &&
           (found.at_ns <= newer_than_ns || strstr(found.words, words) == NULL)) {
        (void)usleep(1000);
        found = fc_beats_heard(beats, rank);
    }
    CHECK(found.at_ns > newer_than_ns);
    CHECK(strstr(found.words, words) != NULL);
    return found;
}

static void await_sets(store *s, int n)
{
    const int64_t deadline_ns = fc_deadline_ns(10 * FC_NS_PER_S);

    while (atomic_load(&s->n_sets) < n && fc_now_ns() < deadline_ns) {
        (void)usleep(1000);
    }
    CHECK(atomic_load(&s->n_sets) >= n);
}

/* The thread may be the last to let go. */
static void drop(store *s, int n_users)
{
    const int64_t deadline_ns = fc_deadline_ns(10 * FC_NS_PER_S);

    while (atomic_load(&s->n_released) < n_users && fc_now_ns() < deadline_ns) {
        (void)usleep(1000);
    }
    CHECK_EQ(atomic_load(&s->n_released), n_users);
    (void)usleep(10 * 1000); /* the rest of it goes */
    free(s);
}

static void test_ranks_hear_each_other(void)
{
    static const int both[] = {1, 2}, last[] = {2};
    store *s = make_store();
    fc_beats *a = start(s, 0), *b = start(s, 1);
    fc_beat first;

    await_sets(s, 4);
    CHECK_EQ(atomic_load(&s->n_gets), 0); /* nobody waits */
    CHECK_EQ(fc_beats_heard(a, 1).at_ns, 0);
    fc_beats_say(b, "at train.py:7");
    CHECK_EQ(fc_beats_want(a, both, 2), FC_OK);
    first = await_beat(a, 1, 0, "at train.py:7");
    (void)await_beat(a, 1, first.at_ns, "at train.py:7");
    CHECK_EQ(fc_beats_heard(a, 2).at_ns, 0); /* there is no such rank */
    fc_beats_stop(b);
    await_sets(s, atomic_load(&s->n_sets) + 5);
    first = fc_beats_heard(a, 1);
    await_sets(s, atomic_load(&s->n_sets) + 5);
    CHECK_EQ(fc_beats_heard(a, 1).at_ns, first.at_ns);
    CHECK_EQ(fc_beats_want(a, both, 2), FC_OK);
    CHECK_EQ(fc_beats_heard(a, 1).at_ns, first.at_ns); /* what was known stays */
    CHECK_EQ(fc_beats_want(a, last, 1), FC_OK);
    CHECK_EQ(fc_beats_heard(a, 1).at_ns, 0);
    CHECK_EQ(fc_beats_want(a, both, 2), FC_OK);
    await_sets(s, atomic_load(&s->n_sets) + 5);
    CHECK_EQ(fc_beats_heard(a, 1).at_ns, 0); /* an old sign is none */
    CHECK_HAS(fc_beats_heard(a, 1).words, "at train.py:7");
    fc_beats_stop(a);
    drop(s, 2);
}

static void test_a_store_that_fails(void)
{
    store *s = make_store();
    fc_beats *a = start(s, 0);
    int64_t at_ns;

    await_sets(s, 2);
    atomic_store(&s->fails, true);
    (void)usleep(50 * 1000);
    at_ns = fc_beats_answered_ns(a);
    (void)usleep(50 * 1000);
    CHECK_EQ(fc_beats_answered_ns(a), at_ns);
    atomic_store(&s->fails, false);
    await_sets(s, atomic_load(&s->n_sets) + 2);
    CHECK(fc_beats_answered_ns(a) > at_ns);
    fc_beats_stop(a);
    drop(s, 1);
}

static void test_a_store_that_hangs(void)
{
    const int64_t began_ns = fc_now_ns();
    store *s = make_store();
    fc_beats *a = start(s, 0);

    await_sets(s, 1);
    atomic_store(&s->hangs, true);
    (void)usleep(50 * 1000);
    fc_beats_say(a, "nobody hears it");
    fc_beats_stop(a);
    CHECK(fc_now_ns() - began_ns < 20 * FC_NS_PER_S);
    CHECK_EQ(atomic_load(&s->n_released), 0); /* its thread has it */
    atomic_store(&s->hangs, false);
    drop(s, 1);
}

static void test_without_memory(void)
{
    store *s = make_store();
    const fc_beats_ops ops = {s, set, get, release};
    fc_beats *a = NULL;

    fc_alloc_fail_after(0);
    CHECK_EQ(fc_beats_start(&ops, 0, PERIOD_NS, &a), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_EQ(atomic_load(&s->n_released), 1);
    free(s);
}

int main(void)
{
    test_ranks_hear_each_other();
    test_a_store_that_fails();
    test_a_store_that_hangs();
    test_without_memory();
    CHECK_EQ(fc_alloc_live(), 0);
    return check_result();
}
