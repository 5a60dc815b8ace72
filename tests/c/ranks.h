/* Ranks of a C test: forked children, with an exchange over shared memory for set-up.
 *
 * ranks_run() forks n children, runs body(rank, arg) in each, and gives back how each of them
 * ended. A child that does not end within RANKS_LIMIT_S is killed.
 */
#ifndef FC_TESTS_RANKS_H
#define FC_TESTS_RANKS_H

#include "base/clock.h"
#include "check.h"
#include "transport/transport.h"

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef RANKS_MAX
#define RANKS_MAX 4
#endif
#define RANKS_LIMIT_S 180 /* of computing without optimization; waits end long before */
#define RANKS_BOX_BYTES 4096

/* One meeting place per group of ranks; shared by all children. */
typedef struct ranks_board {
    _Atomic uint64_t sequence[RANKS_MAX];
    char box[RANKS_MAX][2][RANKS_BOX_BYTES];
} ranks_board;

/* What a child's exchange needs; context of fc_host_ops. */
typedef struct ranks_host {
    ranks_board *board;
    int rank;
    int n_ranks;
    int fail_at; /* which exchange fails here; 0: none */
    int calls;
    int notices;
    int entered;
} ranks_host;

/* Shared by all children of the program: boards, and room for a test's own values. */
typedef struct ranks_shared {
    ranks_board boards[4];
    _Atomic int64_t values[64];
} ranks_shared;

static ranks_shared *ranks_common;

typedef struct ranks_mail {
    char what[64];
    char data[RANKS_BOX_BYTES - 64];
} ranks_mail;

static inline fc_status ranks_exchange(void *context, const char *what, const void *mine,
                                       size_t bytes, void *all_out)
{
    ranks_host *h = context;
    uint64_t sequence = atomic_load(&h->board->sequence[h->rank]) + 1;
    ranks_mail *box = (ranks_mail *)(void *)h->board->box[h->rank][sequence % 2];
    int64_t deadline_ns = fc_deadline_ns(20 * FC_NS_PER_S);

    h->calls++;
    if (bytes > sizeof(box->data)) {
        return fc_fail(FC_ERR_INVALID, "exchange of %zu bytes", bytes);
    }
    (void)snprintf(box->what, sizeof(box->what), "%s", what);
    memcpy(box->data, mine, bytes);
    atomic_store(&h->board->sequence[h->rank], sequence);
    for (int r = 0; r < h->n_ranks; r++) {
        const ranks_mail *theirs = (const ranks_mail *)(void *)h->board->box[r][sequence % 2];

        while (atomic_load(&h->board->sequence[r]) < sequence) {
            if (fc_now_ns() > deadline_ns) {
                return fc_fail(FC_ERR_TIMEOUT, "exchange: rank %d did not come", r);
            }
            (void)sched_yield();
        }
        if (strcmp(theirs->what, what) != 0) {
            return fc_fail(FC_ERR_MISMATCH, "exchange of %s and %s", what, theirs->what);
        }
        if (all_out != NULL) {
            memcpy((char *)all_out + (size_t)r * bytes, theirs->data, bytes);
        }
    }
    if (h->calls == h->fail_at) {
        return fc_fail(FC_ERR_SYSTEM, "exchange fails on purpose");
    }
    return FC_OK;
}

static inline void ranks_notice(void *context, const char *line)
{
    (void)line;
    ((ranks_host *)context)->notices++;
}

static inline void ranks_enter_wait(void *context)
{
    ((ranks_host *)context)->entered++;
}

static inline void ranks_leave_wait(void *context)
{
    ((ranks_host *)context)->entered--;
}

/* A configuration whose global ranks are 10, 11, ...: messages must name those. */
static inline fc_transport_config ranks_config(ranks_host *host, int board, int rank, int n_ranks,
                                               int64_t timeout_ns)
{
    static const int global_ranks[] = {10, 11, 12, 13, 14, 15, 16, 17};

    *host = (ranks_host){.board = &ranks_common->boards[board], .rank = rank, .n_ranks = n_ranks};
    return (fc_transport_config){.name = "test group",
                                 .rank = rank,
                                 .n_ranks = n_ranks,
                                 .global_ranks = global_ranks,
                                 .timeout_ns = timeout_ns,
                                 .host = {.context = host,
                                          .exchange = ranks_exchange,
                                          .enter_wait = ranks_enter_wait,
                                          .leave_wait = ranks_leave_wait,
                                          .notice = ranks_notice}};
}

static inline void ranks_init(void)
{
    if (ranks_common == NULL) {
        void *memory = mmap(NULL, sizeof(ranks_shared), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        CHECK_OR_EXIT(memory != MAP_FAILED);
        ranks_common = memory;
    }
    memset(ranks_common, 0, sizeof(*ranks_common));
}

typedef void (*ranks_body)(int rank, int n_ranks, void *arg);

/* Wait statuses of the children, in rank order. */
static inline void ranks_run(int n_ranks, ranks_body body, void *arg, int *statuses_out)
{
    pid_t pids[RANKS_MAX];
    int64_t deadline_ns = fc_deadline_ns(RANKS_LIMIT_S * FC_NS_PER_S);

    ranks_init();
    (void)fflush(NULL);
    for (int r = 0; r < n_ranks; r++) {
        pids[r] = fork();
        CHECK_OR_EXIT(pids[r] >= 0);
        if (pids[r] == 0) {
            atomic_store(&check_failures, 0);
            body(r, n_ranks, arg);
            _exit(check_result());
        }
    }
    for (int r = 0; r < n_ranks; r++) {
        while (waitpid(pids[r], &statuses_out[r], WNOHANG) == 0) {
            if (fc_now_ns() > deadline_ns) {
                CHECK_MSG(false, "rank %d of %d hangs", r, n_ranks);
                (void)kill(pids[r], SIGKILL);
                (void)waitpid(pids[r], &statuses_out[r], 0);
                break;
            }
            (void)usleep(500);
        }
    }
}

/* Every child must pass. */
static inline void ranks_check(int n_ranks, ranks_body body, void *arg)
{
    int statuses[RANKS_MAX];

    ranks_run(n_ranks, body, arg, statuses);
    for (int r = 0; r < n_ranks; r++) {
        CHECK_MSG(statuses[r] == 0, "rank %d of %d ended with status %#x", r, n_ranks,
                  (unsigned)statuses[r]);
    }
}

/* A test that calls ranks_check(). */
typedef struct ranks_test {
    void (*run)(const void *arg);
    const void *arg;
} ranks_test;

#define RANKS_TESTS_MAX 16

/* Tests that mostly wait, all at once: each in a process of its own, with boards and values of its
 * own. Every one must pass. */
static inline void ranks_check_at_once(const ranks_test *tests, size_t n_tests)
{
    pid_t pids[RANKS_TESTS_MAX];

    CHECK_OR_EXIT(n_tests <= RANKS_TESTS_MAX);
    (void)fflush(NULL);
    for (size_t i = 0; i < n_tests; i++) {
        pids[i] = fork();
        CHECK_OR_EXIT(pids[i] >= 0);
        if (pids[i] == 0) {
            ranks_common = NULL;
            atomic_store(&check_failures, 0);
            tests[i].run(tests[i].arg);
            _exit(check_result());
        }
    }
    for (size_t i = 0; i < n_tests; i++) {
        int status = -1;

        CHECK_EQ(waitpid(pids[i], &status, 0), pids[i]);
        CHECK_MSG(status == 0, "test %zu of those at once ended with status %#x", i,
                  (unsigned)status);
    }
}

static inline void ranks_check_value(int index, int64_t expected)
{
    CHECK_EQ(atomic_load(&ranks_common->values[index]), expected);
}

/* Until a shared value has reached `at_least`; false after 20 s. */
static inline bool ranks_await(int index, int64_t at_least)
{
    int64_t deadline_ns = fc_deadline_ns(20 * FC_NS_PER_S);

    while (atomic_load(&ranks_common->values[index]) < at_least) {
        if (fc_now_ns() > deadline_ns) {
            return false;
        }
        (void)usleep(200);
    }
    return true;
}

/* Whose names have `part` in them. */
static inline int count_entries(const char *folder, const char *part)
{
    DIR *dir = opendir(folder);
    const struct dirent *entry;
    int n = 0;

    CHECK_OR_EXIT(dir != NULL);
    while ((entry = readdir(dir)) != NULL) {
        n += strstr(entry->d_name, part) != NULL;
    }
    (void)closedir(dir);
    return n;
}

static inline int count_descriptors(void)
{
    return count_entries("/proc/self/fd", "");
}

/* Files of shared memory that were made since; snapshots, which other tests take meanwhile, are not
 * of transports. */
static inline int count_shm_files_since(time_t start)
{
    DIR *dir = opendir("/dev/shm");
    const struct dirent *entry;
    struct stat file;
    int n = 0;

    CHECK_OR_EXIT(dir != NULL);
    while ((entry = readdir(dir)) != NULL) {
        n += strstr(entry->d_name, "fsdp") != NULL && strstr(entry->d_name, "snapshot") == NULL &&
             fstatat(dirfd(dir), entry->d_name, &file, 0) == 0 && file.st_mtime >= start;
    }
    (void)closedir(dir);
    return n;
}

/* Mappings of shared memory segments. */
static inline int count_segments(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int n = 0;

    CHECK_OR_EXIT(maps != NULL);
    while (fgets(line, sizeof(line), maps) != NULL) {
        n += strstr(line, "memfd:fsdp_c") != NULL;
    }
    (void)fclose(maps);
    return n;
}

#endif
