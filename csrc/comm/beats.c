/* The thread and what it shares with others, which lives as long as one of them. */
#define _GNU_SOURCE /* names of threads */

#include "comm/beats.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/threads.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define PERIOD_NS FC_NS_PER_S
#define STOP_NS (2 * FC_NS_PER_S)

typedef struct entry {
    int rank;
    fc_beat beat;
} entry;

struct fc_beats {
    fc_beats_ops ops;
    int rank;
    int64_t period_ns;
    _Atomic int n_users; /* the thread, and who has started it */

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    bool is_stopped, has_ended;
    char said[FC_BEATS_WORDS];
    entry *wanted;
    size_t n_wanted;
    int64_t answered_ns;
};

static void lock(fc_beats *b)
{
    (void)pthread_mutex_lock(&b->lock);
}

static void unlock(fc_beats *b)
{
    (void)pthread_mutex_unlock(&b->lock);
}

static void let_go(fc_beats *b)
{
    if (atomic_fetch_sub(&b->n_users, 1) == 1) {
        b->ops.release(b->ops.context);
        (void)pthread_mutex_destroy(&b->lock);
        (void)pthread_cond_destroy(&b->changed);
        fc_free(b->wanted);
        fc_free(b);
    }
}

static entry *find(fc_beats *b, int rank)
{
    for (size_t i = 0; i < b->n_wanted; i++) {
        if (b->wanted[i].rank == rank) {
            return &b->wanted[i];
        }
    }
    return NULL;
}

/* ---- the thread ---- */

static void note(fc_beats *b, int rank, const char *words)
{
    entry *of;

    lock(b);
    of = find(b, rank);
    if (of != NULL && words[0] != '\0' && strcmp(words, of->beat.words) != 0) {
        /* The first that is found may have been left long ago. */
        of->beat.at_ns = of->beat.words[0] != '\0' ? fc_now_ns() : 0;
        (void)snprintf(of->beat.words, sizeof(of->beat.words), "%s", words);
    }
    unlock(b);
}

/* False: there are no more. */
static bool wanted_at(fc_beats *b, size_t i, int *rank)
{
    bool is_there;

    lock(b);
    is_there = i < b->n_wanted;
    *rank = is_there ? b->wanted[i].rank : 0;
    unlock(b);
    return is_there;
}

static fc_status beat(fc_beats *b, uint64_t number)
{
    char words[FC_BEATS_WORDS];
    int rank;

    lock(b);
    (void)snprintf(words, sizeof(words), "%" PRIu64 " %.200s", number, b->said);
    unlock(b);
    FC_TRY(b->ops.set(b->ops.context, b->rank, words));
    for (size_t i = 0; wanted_at(b, i, &rank); i++) {
        words[0] = '\0';
        FC_TRY(b->ops.get(b->ops.context, rank, words));
        note(b, rank, words);
    }
    return FC_OK;
}

static void sleep_for_a_period(fc_beats *b)
{
    const int64_t until = fc_deadline_ns(b->period_ns);

    while (!b->is_stopped && fc_condition_wait(&b->changed, &b->lock, until)) {
    }
}

static void *run(void *arg)
{
    fc_beats *b = arg;
    uint64_t number = 0;
    bool goes_on = true;

    while (goes_on) {
        const fc_status st = beat(b, ++number);

        lock(b);
        if (st == FC_OK) {
            b->answered_ns = fc_now_ns();
        }
        sleep_for_a_period(b);
        goes_on = !b->is_stopped;
        b->has_ended = !goes_on;
        (void)pthread_cond_broadcast(&b->changed);
        unlock(b);
    }
    let_go(b);
    return NULL;
}

fc_status fc_beats_start(const fc_beats_ops *ops, int rank, int64_t period_ns, fc_beats **out)
{
    fc_beats *b = fc_alloc(1, sizeof(*b));

    if (b == NULL) {
        ops->release(ops->context);
        return fc_fail(FC_ERR_NOMEM, "signs of life of rank %d", rank);
    }
    b->ops = *ops;
    b->rank = rank;
    b->period_ns = period_ns > 0 ? period_ns : PERIOD_NS;
    b->answered_ns = fc_now_ns();
    atomic_init(&b->n_users, 2);
    (void)pthread_mutex_init(&b->lock, NULL);
    fc_condition_init(&b->changed);
    if (fc_thread_start(NULL, run, b, NULL) != 0) {
        atomic_store(&b->n_users, 1);
        let_go(b);
        return fc_fail(FC_ERR_NOMEM, "no thread for the signs of life of rank %d", rank);
    }
    *out = b;
    return FC_OK;
}

/* ---- others ---- */

void fc_beats_stop(fc_beats *b)
{
    const int64_t until = fc_deadline_ns(STOP_NS);

    lock(b);
    b->is_stopped = true;
    (void)pthread_cond_broadcast(&b->changed);
    while (!b->has_ended && fc_condition_wait(&b->changed, &b->lock, until)) {
    }
    unlock(b);
    let_go(b);
}

void fc_beats_say(fc_beats *b, const char *words)
{
    lock(b);
    (void)snprintf(b->said, sizeof(b->said), "%s", words);
    unlock(b);
}

fc_status fc_beats_want(fc_beats *b, const int *ranks, size_t n)
{
    entry *wanted = fc_alloc(n > 0 ? n : 1, sizeof(*wanted)), *before;

    if (wanted == NULL) {
        return fc_fail(FC_ERR_NOMEM, "signs of life of %zu ranks", n);
    }
    lock(b);
    for (size_t i = 0; i < n; i++) {
        const entry *known = find(b, ranks[i]);

        wanted[i].rank = ranks[i];
        if (known != NULL) {
            wanted[i] = *known;
        }
    }
    before = b->wanted;
    b->wanted = wanted;
    b->n_wanted = n;
    unlock(b);
    fc_free(before);
    return FC_OK;
}

fc_beat fc_beats_heard(fc_beats *b, int rank)
{
    const entry *of;
    fc_beat found = {.at_ns = 0};

    lock(b);
    of = find(b, rank);
    if (of != NULL) {
        found = of->beat;
    }
    unlock(b);
    return found;
}

int64_t fc_beats_answered_ns(fc_beats *b)
{
    int64_t at_ns;

    lock(b);
    at_ns = b->answered_ns;
    unlock(b);
    return at_ns;
}
