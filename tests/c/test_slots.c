/* The pool of unsharded memory: reuse, best fit, trimming, running out. */
#include "check.h"

#include "base/alloc.h"
#include "engine/slots.h"

#include <stdbool.h>

static void *acquire(fc_slots *slots, size_t bytes)
{
    void *memory = NULL;

    CHECK_EQ(fc_slots_acquire(slots, bytes, &memory), FC_OK);
    CHECK_OR_EXIT(memory != NULL);
    CHECK_EQ((uintptr_t)memory % FC_PAGE, 0);
    memset(memory, 0xa5, bytes);
    return memory;
}

static void test_reuse(void)
{
    fc_slots *slots = NULL;
    void *small, *middle, *large;
    int64_t live;

    CHECK_EQ(fc_slots_create(&slots), FC_OK);
    CHECK_EQ(fc_slots_bytes(slots), 0);
    large = acquire(slots, 5 * FC_PAGE + 1);
    small = acquire(slots, 100);
    middle = acquire(slots, FC_PAGE + 1);
    CHECK(large != small && small != middle && middle != large);
    CHECK_EQ(fc_slots_bytes(slots), 9 * FC_PAGE);
    live = fc_alloc_live();
    for (int i = 0; i < 100; i++) {
        fc_slots_release(slots, i % 2 == 0 ? small : large);
        fc_slots_release(slots, i % 2 == 0 ? large : small);
        fc_slots_release(slots, middle);
        /* The smallest that fits, whatever came first or last. */
        CHECK(acquire(slots, i % 3 == 0 ? FC_PAGE : 1) == small);
        CHECK(acquire(slots, 1) == middle);
        CHECK(acquire(slots, 1) == large);
    }
    CHECK_EQ(fc_alloc_live(), live);
    CHECK_EQ(fc_slots_bytes(slots), 9 * FC_PAGE);
    fc_slots_release(slots, NULL);
    fc_slots_release(slots, middle);
    fc_slots_release(slots, small);
    fc_slots_release(slots, large);
    fc_slots_destroy(slots);
    fc_slots_destroy(NULL);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* Free slots that do not fit make place; slots in use keep their content. */
static void test_replacing_and_trimming(void)
{
    fc_slots *slots = NULL;
    unsigned char *kept;
    void *first, *second;

    CHECK_EQ(fc_slots_create(&slots), FC_OK);
    first = acquire(slots, FC_PAGE);
    kept = acquire(slots, 2 * FC_PAGE);
    fc_slots_release(slots, first);
    second = acquire(slots, 3 * FC_PAGE);
    CHECK_EQ(fc_slots_bytes(slots), 5 * FC_PAGE);
    fc_slots_trim(slots);
    CHECK_EQ(fc_slots_bytes(slots), 5 * FC_PAGE);
    fc_slots_release(slots, second);
    CHECK_EQ(fc_slots_bytes(slots), 5 * FC_PAGE);
    fc_slots_trim(slots);
    CHECK_EQ(fc_slots_bytes(slots), 2 * FC_PAGE);
    for (size_t i = 0; i < 2 * FC_PAGE; i++) {
        CHECK_EQ(kept[i], 0xa5);
    }
    fc_slots_release(slots, kept);
    fc_slots_destroy(slots);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_nothing(void)
{
    fc_slots *slots = NULL;
    void *memory;

    CHECK_EQ(fc_slots_create(&slots), FC_OK);
    memory = acquire(slots, 0);
    CHECK_EQ(fc_slots_bytes(slots), FC_PAGE);
    fc_slots_release(slots, memory);
    fc_slots_destroy(slots);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A failure changes nothing. */
static void test_no_memory(void)
{
    fc_slots *slots = NULL;
    void *memory = NULL;
    void *used;

    fc_alloc_fail_after(0);
    CHECK_EQ(fc_slots_create(&slots), FC_ERR_NOMEM);
    CHECK_EQ(fc_slots_create(&slots), FC_OK);
    used = acquire(slots, 10);
    for (int64_t n = 0; n < 2; n++) {
        fc_alloc_fail_after(n);
        CHECK_EQ(fc_slots_acquire(slots, 2 * FC_PAGE, &memory), FC_ERR_NOMEM);
        CHECK_HAS(fc_last_message(), "8192 bytes");
        CHECK(memory == NULL);
        CHECK_EQ(fc_slots_bytes(slots), FC_PAGE);
    }
    fc_alloc_fail_after(-1);
    memory = acquire(slots, 2 * FC_PAGE);
    fc_slots_release(slots, memory);
    fc_slots_release(slots, used);
    fc_slots_destroy(slots);
    CHECK_EQ(fc_alloc_live(), 0);
}

int main(void)
{
    test_reuse();
    test_replacing_and_trimming();
    test_nothing();
    test_no_memory();
    return check_result();
}
