/* Speed of the hot kernels of every table, in one process and in several at once.
 *
 * Usage: bench_kernels [PROCESSES [TABLE]]. GB/s counts what the kernel is asked to read and write,
 * per process; the median of the repeats is shown. Each result is held to the reference's first.
 * Optimizers' kernels take tensors of up to 16 MiB each.
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
#define MAX_STATE_BYTES ((size_t)16 << 20) /* of each tensor that an optimizer steps */
#define N_NORMS 8                          /* tensors whose norms are taken at once */
#define MAX_REPEATS 201
#define TARGET_NS (60 * FC_NS_PER_MS)

typedef enum kernel_kind {
    CONVERT, /* copy, cast, reduce */
    ADAM,
    SGD,
    NORMS,
    MULTIPLY
} kernel_kind;

typedef struct kernel_job {
    const char *name;
    fc_dtype from;
    fc_dtype to;
    size_t n_srcs; /* 0: a cast, or the copy where both types are U8 */
    double divisor;
    bool accumulate;
    kernel_kind kind;
} kernel_job;

static const kernel_job jobs[] = {
    {"copy", FC_U8, FC_U8, 0, 1, false, CONVERT},
    {"cast F32 BF16", FC_F32, FC_BF16, 0, 1, false, CONVERT},
    {"cast BF16 F32", FC_BF16, FC_F32, 0, 1, false, CONVERT},
    {"reduce F32 F32 x2", FC_F32, FC_F32, 2, 2, false, CONVERT},
    {"reduce F32 F32 x2 /3 +=", FC_F32, FC_F32, 2, 3, true, CONVERT},
    {"reduce F32 F32 x4", FC_F32, FC_F32, 4, 4, false, CONVERT},
    {"reduce F32 F32 x8", FC_F32, FC_F32, 8, 8, false, CONVERT},
    {"reduce BF16 F32 x2", FC_BF16, FC_F32, 2, 2, false, CONVERT},
    {"reduce BF16 BF16 x2", FC_BF16, FC_BF16, 2, 2, false, CONVERT},
    {"reduce F32 BF16 x2", FC_F32, FC_BF16, 2, 2, false, CONVERT},
    {.name = "Adam, fused", .from = FC_F32, .to = FC_F32, .kind = ADAM},
    {.name = "SGD, momentum", .from = FC_F32, .to = FC_F32, .kind = SGD},
    {.name = "norms", .from = FC_F32, .to = FC_F32, .kind = NORMS},
    {.name = "multiply", .from = FC_F32, .to = FC_F32, .kind = MULTIPLY},
};

/* Bytes of the destination, or of the wider of the two types. */
static const size_t sizes[] = {16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static unsigned char *dst;
static unsigned char *expected;
static float *moments[2]; /* an optimizer's state */
static fc_adam adam;
static const fc_sgd sgd = {.momentum = 0.9F, .weight = 1.0F, .step_size = -1e-6F};
static const void *srcs[MAX_SRCS];
static _Atomic int *arrived; /* one counter per round, in memory that all processes share */
static int n_processes = 1;

static void run_norms(const fc_kern_table *table, float *out, size_t numel)
{
    const float *xs[N_NORMS];
    size_t numels[N_NORMS];

    for (size_t i = 0; i < N_NORMS; i++) {
        xs[i] = (const float *)srcs[0] + i * (numel / N_NORMS);
        numels[i] = numel / N_NORMS;
    }
    table->norms(out, xs, numels, N_NORMS);
}

static void run_job(const fc_kern_table *table, const kernel_job *job, void *out, size_t numel)
{
    switch (job->kind) {
    case ADAM:
        table->adam(&adam, FC_ROOT_NEAREST, out, srcs[0], moments[0], moments[1], NULL, numel, 0);
        return;
    case SGD:
        table->sgd(&sgd, out, srcs[0], moments[0], numel, 0);
        return;
    case NORMS:
        run_norms(table, out, numel);
        return;
    case MULTIPLY:
        table->multiply(out, 0.999F, numel);
        return;
    case CONVERT:
        break;
    }
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

/* One call from the same start each time; returns a sum over the state that it leaves. */
static uint64_t run_once(const fc_kern_table *table, const kernel_job *job, void *out, size_t numel)
{
    size_t bytes = numel * fc_dtype_bytes(job->to);
    uint64_t sum = 0;

    memset(out, 0, bytes);
    if (job->kind != CONVERT) {
        memcpy(out, srcs[1], bytes);
        memcpy(moments[0], srcs[2], bytes);
        memcpy(moments[1], srcs[3], bytes);
    }
    run_job(table, job, out, numel);
    for (size_t i = 0; i < numel && job->kind != CONVERT; i++) {
        uint32_t bits[2];

        memcpy(&bits[0], &moments[0][i], sizeof(bits[0]));
        memcpy(&bits[1], &moments[1][i], sizeof(bits[1]));
        sum = sum * 31 + bits[0] + ((uint64_t)bits[1] << 32);
    }
    return sum;
}

static void verify(const fc_kern_table *ref, const fc_kern_table *table, const kernel_job *job,
                   size_t numel)
{
    uint64_t wanted = run_once(ref, job, expected, numel);

    if (run_once(table, job, dst, numel) != wanted ||
        memcmp(dst, expected, numel * fc_dtype_bytes(job->to)) != 0) {
        (void)fprintf(stderr, "%s: %s: wrong result\n", table->name, job->name);
        exit(1);
    }
}

/* What a kernel is asked to read and write for one element. */
static size_t bytes_per_element(const kernel_job *job)
{
    size_t to_bytes = fc_dtype_bytes(job->to);

    switch (job->kind) {
    case ADAM:
        return 7 * sizeof(float); /* four tensors are read, three written */
    case SGD:
        return 5 * sizeof(float);
    case NORMS:
        return sizeof(float);
    case MULTIPLY:
        return 2 * sizeof(float);
    case CONVERT:
        break;
    }
    return (job->n_srcs == 0 ? 1 : job->n_srcs) * fc_dtype_bytes(job->from) + to_bytes +
           (job->accumulate ? to_bytes : 0);
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
        size_t n_sizes = COUNT(sizes);

        if (shows) {
            (void)printf("\n%-26s", job->name);
        }
        while (job->kind != CONVERT && sizes[n_sizes - 1] > MAX_STATE_BYTES) {
            n_sizes--;
        }
        for (size_t i = 0; i < n_sizes; i++) {
            size_t numel = sizes[i] / (from_bytes > to_bytes ? from_bytes : to_bytes);
            int64_t ns;

            verify(ref, table, job, numel);
            meet(round++);
            ns = median_ns(table, job, numel);
            if (shows) {
                (void)printf("%9.1f", (double)(numel * bytes_per_element(job)) / (double)ns);
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
    const fc_adam_options options = {
        .lr = 1e-6, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .is_decoupled = true};
    const fc_kern_table *const *tables;
    size_t n_tables = fc_kern_tables(&tables);

    dst = fc_pages_alloc(FC_FOR_SLOTS, MAX_BYTES);
    expected = fc_pages_alloc(FC_FOR_SLOTS, MAX_BYTES);
    moments[0] = fc_pages_alloc(FC_FOR_SLOTS, MAX_STATE_BYTES);
    moments[1] = fc_pages_alloc(FC_FOR_SLOTS, MAX_STATE_BYTES);
    if (dst == NULL || expected == NULL || moments[0] == NULL || moments[1] == NULL) {
        exit(2);
    }
    fc_adam_set(&adam, &options, 10);
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
    fc_pages_free(FC_FOR_SLOTS, moments[0], MAX_STATE_BYTES);
    fc_pages_free(FC_FOR_SLOTS, moments[1], MAX_STATE_BYTES);
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
