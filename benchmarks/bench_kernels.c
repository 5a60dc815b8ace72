/* Speed of the hot kernels of every table, in one process and in several at once.
 *
 * Usage: bench_kernels [PROCESSES [TABLE]]. GB/s counts what the kernel is asked to read and write,
 * per process; the median of the repeats is shown. Each result is held to the reference's first.
 * The buffers are shared and touched before, so that no page fault is timed.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "kernels/kernels.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_SRCS 8
#define MAX_BYTES ((size_t)64 << 20)
#define MAX_REPEATS 201
#define TARGET_NS (60 * FC_NS_PER_MS)

typedef struct kernel_job {
    const char *name;
    fc_dtype from;
    fc_dtype to;
    size_t n_srcs; /* 0: a cast, or the copy where both types are U8 */
    double divisor;
    bool accumulate;
} kernel_job;

static const kernel_job jobs[] = {
    {"copy", FC_U8, FC_U8, 0, 1, false},
    {"cast F32 BF16", FC_F32, FC_BF16, 0, 1, false},
    {"cast BF16 F32", FC_BF16, FC_F32, 0, 1, false},
    {"reduce F32 F32 x2", FC_F32, FC_F32, 2, 2, false},
    {"reduce F32 F32 x2 /3 +=", FC_F32, FC_F32, 2, 3, true},
    {"reduce F32 F32 x4", FC_F32, FC_F32, 4, 4, false},
    {"reduce F32 F32 x8", FC_F32, FC_F32, 8, 8, false},
    {"reduce BF16 F32 x2", FC_BF16, FC_F32, 2, 2, false},
    {"reduce BF16 BF16 x2", FC_BF16, FC_BF16, 2, 2, false},
    {"reduce F32 BF16 x2", FC_F32, FC_BF16, 2, 2, false},
};

/* Bytes of the destination, or of the wider of the two types. */
static const size_t sizes[] = {16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static unsigned char *dst;
static unsigned char *expected;
static const void *srcs[MAX_SRCS];
static _Atomic int *arrived; /* one counter per round, in memory that all processes share */
static int n_processes = 1;

static void run_job(const fc_kern_table *table, const kernel_job *job, void *out, size_t numel)
{
    if (job->n_srcs != 0) {
        table->reduce[job->from][job->to](out, srcs, job->n_srcs, numel, job->divisor,
                                          job->accumulate);
    } else if (job->from == FC_U8) {
        table->copy(out, srcs[0], numel);
    } else {
        table->cast[job->from][job->to](out, srcs[0], numel);
    }
}

/* All processes begin a measurement together. */
static void meet(int round)
{
    atomic_fetch_add(&arrived[round], 1);
    while (atomic_load(&arrived[round]) < n_processes) {
        (void)usleep(50);
    }
}

static int compare_times(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a;
    int64_t right = *(const int64_t *)b;

    return (left > right) - (left < right);
}

static int64_t median_ns(const fc_kern_table *table, const kernel_job *job, size_t numel)
{
    int64_t times[MAX_REPEATS];
    int64_t end = fc_now_ns() + TARGET_NS;
    size_t n = 0;

    run_job(table, job, dst, numel);
    while (n < MAX_REPEATS && (n < 5 || fc_now_ns() < end)) {
        int64_t start = fc_now_ns();

        run_job(table, job, dst, numel);
        times[n++] = fc_now_ns() - start;
    }
    qsort(times, n, sizeof(times[0]), compare_times);
    return times[n / 2];
}

static void verify(const fc_kern_table *ref, const fc_kern_table *table, const kernel_job *job,
                   size_t numel)
{
    size_t bytes = numel * fc_dtype_bytes(job->to);

    memset(dst, 0, bytes);
    memset(expected, 0, bytes);
    run_job(ref, job, expected, numel);
    run_job(table, job, dst, numel);
    if (memcmp(dst, expected, bytes) != 0) {
        (void)fprintf(stderr, "%s: %s: wrong result\n", table->name, job->name);
        exit(1);
    }
}

static void bench_table(const fc_kern_table *ref, const fc_kern_table *table, bool shows, int round)
{
    if (shows) {
        (void)printf("\n%s, %d at once, GB/s for each\n%-26s", table->name, n_processes, "KiB");
        for (size_t i = 0; i < COUNT(sizes); i++) {
            (void)printf("%9zu", sizes[i] >> 10);
        }
    }
    for (size_t j = 0; j < COUNT(jobs); j++) {
        const kernel_job *job = &jobs[j];
        size_t from_bytes = fc_dtype_bytes(job->from);
        size_t to_bytes = fc_dtype_bytes(job->to);
        size_t n_reads = (job->n_srcs == 0 ? 1 : job->n_srcs) * from_bytes;
        size_t n_writes = to_bytes + (job->accumulate ? to_bytes : 0);

        if (shows) {
            (void)printf("\n%-26s", job->name);
        }
        for (size_t i = 0; i < COUNT(sizes); i++) {
            size_t numel = sizes[i] / (from_bytes > to_bytes ? from_bytes : to_bytes);
            int64_t ns;

            verify(ref, table, job, numel);
            meet(round++);
            ns = median_ns(table, job, numel);
            if (shows) {
                (void)printf("%9.1f", (double)(numel * (n_reads + n_writes)) / (double)ns);
                (void)fflush(stdout);
            }
        }
    }
    if (shows) {
        (void)printf("\n");
    }
}

/* Numbers from 1 to 2, whether read as F32 or as BF16. */
static void *create_source(uint32_t seed)
{
    uint16_t *halves = fc_pages_alloc(FC_FOR_SLOTS, MAX_BYTES);

    if (halves == NULL) {
        exit(2);
    }
    for (size_t i = 0; i < MAX_BYTES / sizeof(*halves); i++) {
        seed = seed * 1664525u + 1013904223u;
        halves[i] = (uint16_t)(0x3f80 | seed >> 25);
    }
    return halves;
}

static void bench(const char *only, bool shows)
{
    const fc_kern_table *const *tables;
    size_t n_tables = fc_kern_tables(&tables);

    dst = fc_pages_alloc(FC_FOR_SLOTS, MAX_BYTES);
    expected = fc_pages_alloc(FC_FOR_SLOTS, MAX_BYTES);
    if (dst == NULL || expected == NULL) {
        exit(2);
    }
    for (size_t s = 0; s < MAX_SRCS; s++) {
        srcs[s] = create_source((uint32_t)s);
    }
    for (size_t i = 0; i < n_tables; i++) {
        if (only == NULL || strcmp(only, tables[i]->name) == 0) {
            bench_table(tables[0], tables[i], shows, (int)(i * COUNT(jobs) * COUNT(sizes)));
        }
    }
    fc_pages_free(FC_FOR_SLOTS, dst, MAX_BYTES);
    fc_pages_free(FC_FOR_SLOTS, expected, MAX_BYTES);
    for (size_t s = 0; s < MAX_SRCS; s++) {
        fc_pages_free(FC_FOR_SLOTS, (void *)(uintptr_t)srcs[s], MAX_BYTES);
    }
}

int main(int argc, char **argv)
{
    const char *only = argc > 2 ? argv[2] : NULL;
    int status = 0;
    int failed = 0;

    n_processes = argc > 1 ? atoi(argv[1]) : 1;
    arrived = mmap(NULL, FC_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (arrived == MAP_FAILED || n_processes < 1) {
        return 2;
    }
    for (int i = 1; i < n_processes; i++) {
        if (fork() == 0) {
            bench(only, false);
            _exit(0);
        }
    }
    bench(only, true);
    while (wait(&status) > 0) {
        failed |= status;
    }
    return failed != 0;
}
