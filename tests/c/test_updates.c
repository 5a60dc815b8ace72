/* What shards have seen: steps from when an optimizer came, each once for many shards, and loads;
 * counters that outlive their holders; running out of memory.
 */
#include "check.h"

#include "base/alloc.h"
#include "engine/updates.h"

#define N_COUNTERS 50

static fc_step_counter *make(void)
{
    fc_step_counter *counter = NULL;

    CHECK_EQ(fc_step_counter_create(&counter), FC_OK);
    CHECK_OR_EXIT(counter != NULL);
    return counter;
}

static bool follow(fc_updates *updates, fc_step_counter *counter)
{
    bool is_news = false;

    CHECK_EQ(fc_updates_follow(updates, counter, &is_news), FC_OK);
    return is_news;
}

static void test_counts(void)
{
    fc_updates updates = {0};
    fc_step_counter *early = make(), *late = make();

    CHECK_EQ(fc_updates_count(&updates), 0);
    fc_step_counter_count(early);
    CHECK(follow(&updates, early));
    CHECK_EQ(fc_updates_count(&updates), 0);
    fc_step_counter_count(early);
    fc_step_counter_count(late);
    CHECK(follow(&updates, late));
    CHECK(!follow(&updates, early) && !follow(&updates, late));
    CHECK_EQ(fc_updates_count(&updates), 1);
    fc_step_counter_count(late);
    fc_updates_load(&updates);
    CHECK_EQ(fc_updates_count(&updates), 3);
    fc_step_counter_release(early); /* what it has counted stays */
    fc_step_counter_release(late);
    CHECK_EQ(fc_updates_count(&updates), 3);
    fc_updates_clear(&updates);
    CHECK_EQ(fc_updates_count(&updates), 0);
    fc_updates_clear(&updates);
}

/* Of two units: a step of an optimizer that holds shards of both is one, from when it came to the
 * first of them. */
static void test_sums(void)
{
    fc_updates first = {0}, second = {0}, sum = {0};
    fc_step_counter *shared = make(), *own = make();

    CHECK(follow(&first, shared));
    fc_step_counter_count(shared);
    CHECK(follow(&second, shared));
    CHECK(follow(&second, own));
    fc_step_counter_count(shared);
    fc_step_counter_count(own);
    fc_updates_load(&first);
    CHECK_EQ(fc_updates_add(&sum, &second), FC_OK);
    CHECK_EQ(fc_updates_count(&sum), 2);
    CHECK_EQ(fc_updates_add(&sum, &first), FC_OK);
    CHECK_EQ(fc_updates_count(&sum), 4);
    fc_updates_clear(&first);
    fc_updates_clear(&second);
    fc_step_counter_release(shared);
    fc_step_counter_count(own);
    CHECK_EQ(fc_updates_count(&sum), 5);
    fc_step_counter_release(own);
    fc_updates_clear(&sum);
}

/* In any order of the counters. */
static void test_many(void)
{
    fc_updates updates = {0};
    fc_step_counter *counters[N_COUNTERS];

    for (size_t i = 0; i < N_COUNTERS; i++) {
        counters[i] = make();
    }
    for (size_t i = 0; i < N_COUNTERS; i++) {
        CHECK(follow(&updates, counters[i * 7 % N_COUNTERS]));
    }
    for (size_t i = 0; i < N_COUNTERS; i++) {
        CHECK(!follow(&updates, counters[i]));
        fc_step_counter_count(counters[i]);
        CHECK_EQ(fc_updates_count(&updates), i + 1);
        fc_step_counter_release(counters[i]);
    }
    fc_updates_clear(&updates);
}

static void test_no_memory(void)
{
    fc_updates updates = {0};
    fc_step_counter *counter = make(), *none = NULL;
    bool is_news;

    fc_alloc_fail_after(0);
    CHECK_EQ(fc_step_counter_create(&none), FC_ERR_NOMEM);
    CHECK(none == NULL);
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_updates_follow(&updates, counter, &is_news), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_EQ(fc_updates_count(&updates), 0);
    CHECK(follow(&updates, counter));
    fc_step_counter_release(counter);
    fc_updates_clear(&updates);
}

int main(void)
{
    test_counts();
    test_sums();
    test_many();
    test_no_memory();
    CHECK_EQ(fc_alloc_live(), 0);
    return check_result();
}
