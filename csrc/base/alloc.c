/* Counting allocator over calloc and mmap. */
#include "base/alloc.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#define LARGE_PAGE_BYTES ((size_t)2 << 20)

static _Atomic int64_t live;
static _Atomic int64_t account[FC_PURPOSE_COUNT];
static _Atomic int64_t fail_after = -1;

void fc_account_add(fc_purpose purpose, int64_t bytes)
{
    atomic_fetch_add_explicit(&account[purpose], bytes, memory_order_relaxed);
}

int64_t fc_account_bytes(fc_purpose purpose)
{
    return atomic_load_explicit(&account[purpose], memory_order_relaxed);
}

/* True when the test aid wants this request to fail. */
static int must_fail(void)
{
    int64_t left = atomic_load_explicit(&fail_after, memory_order_relaxed);

    if (left < 0) {
        return 0;
    }
    atomic_store_explicit(&fail_after, left - 1, memory_order_relaxed);
    return left == 0;
}

void *fc_alloc(size_t count, size_t bytes)
{
    void *memory = must_fail() ? NULL : calloc(count ? count : 1, bytes ? bytes : 1);

    if (memory != NULL) {
        atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
        fc_account_add(FC_FOR_OBJECTS, (int64_t)malloc_usable_size(memory));
    }
    return memory;
}

void fc_free(void *memory)
{
    if (memory != NULL) {
        fc_account_add(FC_FOR_OBJECTS, -(int64_t)malloc_usable_size(memory));
        atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
        free(memory);
    }
}

void *fc_pages_alloc(fc_purpose purpose, size_t bytes)
{
    void *memory;

    bytes = fc_round_up(bytes ? bytes : 1, FC_PAGE);
    if (must_fail()) {
        return NULL;
    }
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    if (bytes >= 2 * LARGE_PAGE_BYTES) {
        (void)madvise(memory, bytes, MADV_HUGEPAGE); /* a hint: refusal costs only speed */
    }
    atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    fc_account_add(purpose, (int64_t)bytes);
    return memory;
}

void fc_pages_free(fc_purpose purpose, void *memory, size_t bytes)
{
    if (memory != NULL) {
        bytes = fc_round_up(bytes ? bytes : 1, FC_PAGE);
        fc_account_add(purpose, -(int64_t)bytes);
        atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
        (void)munmap(memory, bytes);
    }
}

int64_t fc_alloc_live(void)
{
    return atomic_load_explicit(&live, memory_order_relaxed);
}

void fc_alloc_fail_after(int64_t n)
{
    atomic_store_explicit(&fail_after, n, memory_order_relaxed);
}
