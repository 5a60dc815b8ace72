/* Snapshots: sums in any order, copies that count only when they are whole, the end of ranks. */
#include "check.h"

#include "base/alloc.h"
#include "base/idle.h"
#include "snapshot/copier.h"
#include "snapshot/ranks.h"
#include "snapshot/snapshot.h"
#include "snapshot/sums.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_PIECES 5
#define ENDED (FC_SNAPSHOT_WORDS - 1)

static const char index_text[] = "what the pieces are";

static void *pages(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK(memory != MAP_FAILED);
    return memory;
}

static char *filled(size_t bytes, unsigned seed)
{
    char *memory = malloc(bytes + 1);

    for (size_t i = 0; i < bytes; i++) {
        seed = seed * 1103515245U + 12345U;
        memory[i] = (char)(seed >> 16);
    }
    return memory;
}

/* ---- sums ---- */

static void test_sums(void)
{
    enum {
        BYTES = 10 * 64 + 17,
        ROWS = 11
    };
    char *from = filled(BYTES, 1), *to = aligned_alloc(FC_ALIGN, ROWS * FC_SUM_ROW);
    fc_sums whole = {0}, parts = {0}, other = {0};

    memset(to, 1, ROWS * FC_SUM_ROW);
    fc_sums_copy(&whole, to, from, BYTES, 0, ROWS);
    CHECK(memcmp(from, to, BYTES) == 0);
    for (size_t i = BYTES; i < ROWS * FC_SUM_ROW; i++) {
        CHECK_EQ(to[i], 0);
    }
    /* In another order, without a copy. */
    fc_sums_copy(&parts, NULL, from + 7 * 64, BYTES - 7 * 64, 7, ROWS);
    fc_sums_copy(&parts, NULL, from, 3 * 64, 0, ROWS);
    fc_sums_copy(&parts, NULL, from + 3 * 64, 4 * 64, 3, ROWS);
    CHECK(fc_sums_mixed(&whole) == fc_sums_mixed(&parts));
    for (size_t bit = 0; bit < (size_t)8 * BYTES; bit += 13) {
        from[bit / 8] = (char)(from[bit / 8] ^ (1 << bit % 8));
        other = (fc_sums){0};
        fc_sums_copy(&other, NULL, from, BYTES, 0, ROWS);
        CHECK(fc_sums_mixed(&whole) != fc_sums_mixed(&other));
        from[bit / 8] = (char)(from[bit / 8] ^ (1 << bit % 8));
    }
    /* Rows that change places. */
    memcpy(to, from, BYTES);
    memcpy(to, from + 64, 64);
    memcpy(to + 64, from, 64);
    other = (fc_sums){0};
    fc_sums_copy(&other, NULL, to, BYTES, 0, ROWS);
    CHECK(fc_sums_mixed(&whole) != fc_sums_mixed(&other));
    free(from);
    free(to);
}

/* ---- copies ---- */

static const size_t sizes[N_PIECES] = {0, 3, 5 << 20, 64, (2 << 20) + 1};

typedef struct world {
    fc_snapshot_piece pieces[N_PIECES];
    char *memory[N_PIECES];
    char *file;
    size_t file_bytes;
    bool is_unchanged;
    bool comes; /* what a device copies */
    int n_awaited;
    char *on_device; /* piece 2, before it is there */
} world;

static bool answer(void *owner)
{
    return ((const world *)owner)->is_unchanged;
}

static void open_world(world *w)
{
    *w = (world){.is_unchanged = true};
    for (size_t i = 0; i < N_PIECES; i++) {
        w->memory[i] = filled(sizes[i], (unsigned)i + 1);
        w->pieces[i] = (fc_snapshot_piece){w->memory[i], sizes[i], 0, i == 3};
    }
    w->file_bytes = FC_SNAPSHOT_PAGE + fc_snapshot_place(w->pieces, N_PIECES) + sizeof(index_text);
    w->file = pages(w->file_bytes);
}

static void close_world(world *w)
{
    for (size_t i = 0; i < N_PIECES; i++) {
        free(w->memory[i]);
    }
    CHECK_EQ(munmap(w->file, w->file_bytes), 0);
}

static fc_snapshot_job job_of(world *w, uint64_t step)
{
    return (fc_snapshot_job){.file = w->file,
                             .sequence = step + 100,
                             .step = step,
                             .pieces = w->pieces,
                             .n_pieces = N_PIECES,
                             .index = index_text,
                             .index_bytes = sizeof(index_text),
                             .is_unchanged = answer,
                             .owner = w};
}

static void check_file(const world *w, uint64_t step)
{
    fc_snapshot_facts facts;

    CHECK(fc_snapshot_read(w->file, w->file_bytes, &facts));
    CHECK_EQ((int64_t)facts.step, (int64_t)step);
    CHECK_EQ((int64_t)facts.sequence, (int64_t)step + 100);
    CHECK(fc_snapshot_is_intact(w->file, w->file_bytes));
    CHECK(memcmp(w->file + FC_SNAPSHOT_PAGE + facts.data_bytes, index_text, facts.index_bytes) ==
          0);
    for (size_t i = 0; i < N_PIECES; i++) {
        CHECK_EQ(w->pieces[i].at % FC_ALIGN, 0);
        CHECK(memcmp(w->file + FC_SNAPSHOT_PAGE + w->pieces[i].at, w->memory[i], sizes[i]) == 0);
    }
}

static void test_copies(void)
{
    fc_snapshot_facts facts;
    fc_copier *copier;
    fc_snapshot_job job;
    world w;

    open_world(&w);
    CHECK_EQ(fc_copier_create(&copier), FC_OK);
    CHECK(!fc_copier_finish(copier)); /* nothing has begun */
    CHECK(!fc_snapshot_read(w.file, w.file_bytes, &facts));
    for (uint64_t step = 1; step < 20; step++) {
        w.memory[2][step] = (char)step;
        job = job_of(&w, step);
        CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
        CHECK(fc_copier_finish(copier));
        check_file(&w, step);
    }
    /* What is copied at once may change. */
    job = job_of(&w, 20);
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    w.memory[3][0] ^= 1;
    CHECK(fc_copier_finish(copier));
    CHECK(fc_snapshot_is_intact(w.file, w.file_bytes));
    w.memory[3][0] ^= 1;
    check_file(&w, 20);
    /* Memory that was written meanwhile. */
    w.is_unchanged = false;
    job = job_of(&w, 21);
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    CHECK(!fc_copier_finish(copier));
    CHECK(!fc_snapshot_read(w.file, w.file_bytes, &facts));
    w.is_unchanged = true;
    /* The end finishes what has begun. */
    job = job_of(&w, 22);
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    fc_copier_destroy(copier);
    check_file(&w, 22);
    close_world(&w);
}

/* ---- the owner commits ---- */

static _Atomic int n_asked;

static void note_asked(void *owner)
{
    (void)owner;
    n_asked++;
}

/* Waits until the copier has asked so many times. */
static void await_asked(int times)
{
    for (int i = 0; n_asked < times && i < 100000; i++) {
        (void)usleep(100);
    }
    CHECK(n_asked >= times);
}

/* Who waits for something copies a little at a time, as long as the thread has not begun. */
static void test_copies_of_who_waits(void)
{
    const int n_runs = 1 + (5 << 20) / (1 << 16) + (2 << 20) / (1 << 16) + 1;
    fc_copier *copier;
    fc_snapshot_job job;
    world w;
    int n = 0;

    open_world(&w);
    CHECK_EQ(fc_copier_create(&copier), FC_OK);
    job = job_of(&w, 1);
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    (void)usleep(1200000); /* of the next copy the thread lets 900 ms pass */
    CHECK(fc_copier_finish(copier));
    check_file(&w, 1);
    job = job_of(&w, 2);
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    (void)usleep(20000); /* and keeps nobody from it who comes before */
    while (fc_idle_step()) {
        n++;
    }
    CHECK_EQ(n, n_runs);
    fc_copier_commit(copier); /* all is copied, and nobody has to come for it to count */
    check_file(&w, 2);
    (void)usleep(600000);
    CHECK(fc_copier_finish(copier));
    /* Nobody is left in it. */
    job = job_of(&w, 3);
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    CHECK(fc_idle_step());
    fc_copier_destroy(copier);
    CHECK(!fc_idle_step());
    check_file(&w, 3);
    close_world(&w);
}

static void test_commits(void)
{
    fc_snapshot_facts facts;
    fc_copier *copier;
    fc_snapshot_job job;
    world w;

    open_world(&w);
    CHECK_EQ(fc_copier_create(&copier), FC_OK);
    fc_copier_commit(copier); /* nothing has begun */
    for (uint64_t step = 1; step <= 4; step++) {
        job = job_of(&w, step);
        job.ask_for_commit = note_asked;
        n_asked = 0;
        CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
        await_asked(3); /* and again, as long as there is no answer */
        CHECK(!fc_snapshot_read(w.file, w.file_bytes, &facts));
        CHECK_EQ(fc_copier_start(copier, &job), FC_ERR_STATE);
        if (step == 3) { /* written before the commit */
            w.is_unchanged = false;
            fc_copier_commit(copier);
            CHECK(!fc_snapshot_read(w.file, w.file_bytes, &facts));
            w.is_unchanged = true; /* what is judged once stays so */
            fc_copier_commit(copier);
            CHECK(!fc_copier_finish(copier));
            CHECK(!fc_snapshot_read(w.file, w.file_bytes, &facts));
            continue;
        }
        if (step < 3) {
            fc_copier_commit(copier);
            check_file(&w, step);
            fc_copier_commit(copier);
            w.is_unchanged = false; /* too late to matter */
        }
        CHECK(fc_copier_finish(copier));
        w.is_unchanged = true;
        check_file(&w, step);
    }
    /* A commit that comes too early does nothing. */
    for (uint64_t step = 5; step < 50; step++) {
        job = job_of(&w, step);
        CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
        fc_copier_commit(copier);
        CHECK(fc_copier_finish(copier));
        check_file(&w, step);
    }
    job = job_of(&w, 50); /* the end does not wait for who is asked */
    job.ask_for_commit = note_asked;
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    fc_copier_destroy(copier);
    check_file(&w, 50);
    close_world(&w);
}

/* Who waits for a device's copy, this thread or the copier's, puts it there. */
static bool await_device(void *owner)
{
    world *w = owner;

    w->n_awaited++;
    if (w->comes) {
        memcpy(w->memory[2], w->on_device, sizes[2]);
    }
    return w->comes;
}

static void test_awaited(void)
{
    fc_copier *copier;
    world w;

    open_world(&w);
    w.on_device = filled(sizes[2], 77);
    CHECK_EQ(fc_copier_create(&copier), FC_OK);
    for (uint64_t step = 1; step <= 40; step++) {
        fc_snapshot_job job = job_of(&w, step);

        job.await = await_device;
        w.n_awaited = 0;
        w.comes = step % 4 != 0;
        memset(w.memory[2], 0, sizes[2]);
        CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
        if (step % 2 == 0) {
            (void)usleep(200); /* the copier's thread comes first */
        }
        CHECK(fc_copier_finish(copier) == w.comes);
        CHECK_EQ(w.n_awaited, 1);
        if (w.comes) {
            check_file(&w, step);
            CHECK(memcmp(w.file + FC_SNAPSHOT_PAGE + w.pieces[2].at, w.on_device, sizes[2]) == 0);
        } else {
            fc_snapshot_facts facts;

            CHECK(!fc_snapshot_read(w.file, w.file_bytes, &facts));
        }
    }
    fc_copier_destroy(copier);
    free(w.on_device);
    close_world(&w);
}

/* Both threads have come by then. */
static bool is_there_soon(void *owner)
{
    (void)owner;
    (void)usleep(1000);
    return true;
}

/* Runs so short that the copier's thread and this one meet between them all the time. */
static void test_many_pieces(void)
{
    enum {
        N = 1000
    };
    char *memory = filled((size_t)N * FC_SUM_ROW, 5);
    fc_snapshot_piece *pieces = calloc(N, sizeof(*pieces));
    const size_t file_bytes = FC_SNAPSHOT_PAGE + (size_t)N * FC_SUM_ROW + sizeof(index_text);
    fc_copier *copier;
    world w = {.is_unchanged = true};

    w.file = pages(file_bytes);
    for (size_t i = 0; i < N; i++) {
        pieces[i] = (fc_snapshot_piece){memory + i * FC_SUM_ROW, FC_SUM_ROW, 0, false};
    }
    CHECK_EQ((int64_t)fc_snapshot_place(pieces, N), N * FC_SUM_ROW);
    CHECK_EQ(fc_copier_create(&copier), FC_OK);
    for (uint64_t step = 1; step <= 20; step++) {
        fc_snapshot_job job = job_of(&w, step);

        job.pieces = pieces;
        job.n_pieces = N;
        job.await = step % 2 == 0 ? is_there_soon : NULL;
        CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
        while (step % 2 == 1 && fc_idle_step()) {
        }
        CHECK(fc_copier_finish(copier));
        CHECK(fc_snapshot_is_intact(w.file, file_bytes));
        CHECK(memcmp(w.file + FC_SNAPSHOT_PAGE, memory, (size_t)N * FC_SUM_ROW) == 0);
        memory[step * 100]++;
    }
    fc_copier_destroy(copier);
    CHECK_EQ(munmap(w.file, file_bytes), 0);
    free(pieces);
    free(memory);
}

/* Each byte counts, and so does the length. */
static void test_torn(void)
{
    fc_snapshot_facts facts;
    fc_copier *copier;
    fc_snapshot_job job;
    world w;

    open_world(&w);
    CHECK_EQ(fc_copier_create(&copier), FC_OK);
    job = job_of(&w, 7);
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    CHECK(fc_copier_finish(copier));
    for (size_t at = 0; at < 72; at++) { /* the header */
        w.file[at] = (char)(w.file[at] ^ 0x10);
        CHECK_MSG(!fc_snapshot_read(w.file, w.file_bytes, &facts), "byte %zu", at);
        w.file[at] = (char)(w.file[at] ^ 0x10);
    }
    for (size_t at = FC_SNAPSHOT_PAGE; at < w.file_bytes; at += 1 << 20) {
        const size_t byte = w.pieces[3].at + FC_SNAPSHOT_PAGE > at ? at + 64 : w.file_bytes - 1;

        w.file[byte] = (char)(w.file[byte] ^ 1);
        CHECK(fc_snapshot_read(w.file, w.file_bytes, &facts));
        CHECK_MSG(!fc_snapshot_is_intact(w.file, w.file_bytes), "byte %zu", byte);
        w.file[byte] = (char)(w.file[byte] ^ 1);
    }
    check_file(&w, 7);
    CHECK(!fc_snapshot_read(w.file, w.file_bytes - 1, &facts));
    CHECK(!fc_snapshot_read(w.file, FC_SNAPSHOT_PAGE, &facts));
    CHECK(!fc_snapshot_read(w.file, 10, &facts));
    fc_snapshot_clear(w.file);
    CHECK(!fc_snapshot_read(w.file, w.file_bytes, &facts));
    fc_copier_destroy(copier);
    close_world(&w);
}

/* A copy of data, index and header elsewhere is a snapshot, too. */
static void test_adopted(void)
{
    char header[FC_SNAPSHOT_HEADER];
    fc_snapshot_facts facts;
    fc_copier *copier;
    fc_snapshot_job job;
    world w, other;

    open_world(&w);
    open_world(&other);
    CHECK_EQ(fc_copier_create(&copier), FC_OK);
    job = job_of(&w, 9);
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    CHECK(fc_copier_finish(copier));
    memcpy(other.file + FC_SNAPSHOT_PAGE, w.file + FC_SNAPSHOT_PAGE,
           w.file_bytes - FC_SNAPSHOT_PAGE);
    fc_snapshot_header(w.file, header);
    CHECK(fc_snapshot_adopt(other.file, other.file_bytes, header));
    CHECK(fc_snapshot_is_intact(other.file, other.file_bytes));
    CHECK(fc_snapshot_read(other.file, other.file_bytes, &facts));
    CHECK_EQ(facts.step, 9);
    /* What is none, or does not fit, leaves none. */
    CHECK(!fc_snapshot_adopt(other.file, other.file_bytes - 1, header));
    CHECK(!fc_snapshot_read(other.file, other.file_bytes, &facts));
    CHECK(!fc_snapshot_adopt(other.file, FC_SNAPSHOT_PAGE - 1, header));
    for (size_t at = 0; at < sizeof(header); at++) {
        header[at] = (char)(header[at] ^ 0x10);
        CHECK_MSG(!fc_snapshot_adopt(other.file, other.file_bytes, header), "byte %zu", at);
        CHECK(!fc_snapshot_read(other.file, other.file_bytes, &facts));
        header[at] = (char)(header[at] ^ 0x10);
    }
    CHECK(fc_snapshot_adopt(other.file, other.file_bytes, header));
    other.file[FC_SNAPSHOT_PAGE] ^= 1; /* the bytes themselves are looked at by who reads them */
    CHECK(!fc_snapshot_is_intact(other.file, other.file_bytes));
    fc_copier_destroy(copier);
    close_world(&other);
    close_world(&w);
}

/* A process that is killed while it copies leaves no snapshot that counts, or a whole one. */
static void test_killed(void)
{
    int n_whole = 0;

    for (int delay_us = 0; delay_us < 20000 || (n_whole == 0 && delay_us < 1000000);
         delay_us += 700) {
        fc_snapshot_facts facts;
        int status;
        pid_t child;
        world w;

        open_world(&w);
        child = fork();
        if (child == 0) {
            fc_copier *copier;

            if (fc_copier_create(&copier) == FC_OK) {
                for (uint64_t step = 1;; step++) {
                    const fc_snapshot_job job = job_of(&w, step);

                    memset(w.memory[2], (int)step, sizes[2]);
                    (void)!fc_copier_start(copier, &job);
                    (void)fc_copier_finish(copier);
                }
            }
            _exit(1);
        }
        (void)usleep((useconds_t)delay_us);
        CHECK_EQ(kill(child, SIGKILL), 0);
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK(WIFSIGNALED(status));
        if (fc_snapshot_read(w.file, w.file_bytes, &facts)) {
            n_whole++;
            memset(w.memory[2], (int)facts.step, sizes[2]);
            check_file(&w, facts.step);
        }
        close_world(&w);
    }
    CHECK(n_whole > 0);
}

static void test_children_let_go(void)
{
    fc_copier *copier;
    fc_snapshot_job job;
    int status;
    pid_t child;
    world w;

    open_world(&w);
    job = job_of(&w, 1);
    CHECK_EQ(fc_copier_create(&copier), FC_OK);
    CHECK_EQ(fc_copier_start(copier, &job), FC_OK);
    child = fork();
    if (child == 0) {
        CHECK(!fc_idle_step());
        fc_copier_commit(copier);
        CHECK(!fc_copier_finish(copier));
        fc_copier_destroy(copier);
        _exit(check_result());
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    fc_copier_destroy(copier);
    check_file(&w, 1);
    close_world(&w);
}

/* ---- ranks ---- */

enum {
    N_RANKS = 2
};

static char folder[] = "/tmp/test_snapshot_XXXXXX";
static char names[N_RANKS][64];
static const char *const paths[N_RANKS] = {names[0], names[1]};

static void make_files(void)
{
    for (int rank = 0; rank < N_RANKS; rank++) {
        int fd = open(names[rank], O_RDWR | O_CREAT | O_TRUNC, 0600);

        CHECK(fd >= 0);
        CHECK_EQ(ftruncate(fd, FC_SNAPSHOT_PAGE), 0);
        CHECK_EQ(close(fd), 0);
    }
}

static bool are_there(void)
{
    return access(names[0], F_OK) == 0 && access(names[1], F_OK) == 0;
}

static void test_ranks(void)
{
    fc_snapshot_ranks *first, *second;

    make_files();
    CHECK_EQ(fc_snapshot_ranks_open(paths, N_RANKS, 0, paths, N_RANKS, &first), FC_OK);
    CHECK_EQ(fc_snapshot_ranks_open(paths, N_RANKS, 1, paths, N_RANKS, &second), FC_OK);
    fc_snapshot_ranks_set_word(first, 1, 42);
    CHECK(fc_snapshot_ranks_word(second, 0, 1) == 42);
    CHECK(fc_snapshot_ranks_word(first, 1, 1) == 0);
    CHECK(!fc_snapshot_ranks_end(first));
    CHECK(are_there());
    CHECK(fc_snapshot_ranks_end(second));
    CHECK(access(names[0], F_OK) != 0 && access(names[1], F_OK) != 0);
    fc_snapshot_ranks_close(second);
    fc_snapshot_ranks_close(first);
    CHECK_EQ(fc_snapshot_ranks_open(paths, N_RANKS, 0, paths, N_RANKS, &first), FC_ERR_SYSTEM);
    CHECK(strstr(fc_last_message(), names[0]) != NULL);
}

/* A child that exits so after it has opened the pages as rank 0; rank 1 has ended. */
static void exit_with(int status, bool closes)
{
    fc_snapshot_ranks *ranks;
    int ended;
    pid_t child = fork();

    if (child == 0) {
        if (fc_snapshot_ranks_open(paths, N_RANKS, 0, paths, N_RANKS, &ranks) != FC_OK) {
            _exit(77);
        }
        if (closes) {
            fc_snapshot_ranks_close(ranks);
        }
        if (fork() == 0) {
            exit(0); /* its own child ends nothing */
        }
        (void)wait(NULL);
        if (!closes && fc_snapshot_ranks_word(ranks, 0, ENDED) != 0) {
            _exit(78);
        }
        exit(status);
    }
    CHECK_EQ(waitpid(child, &ended, 0), child);
    CHECK_EQ(WEXITSTATUS(ended), status);
}

static void test_exits(void)
{
    fc_snapshot_ranks *other;

    make_files();
    CHECK_EQ(fc_snapshot_ranks_open(paths, N_RANKS, 1, paths, N_RANKS, &other), FC_OK);
    exit_with(0, false);
    CHECK(are_there()); /* rank 1 is at work */
    CHECK(fc_snapshot_ranks_word(other, 0, ENDED) != 0);
    make_files();
    fc_snapshot_ranks_close(other);
    CHECK_EQ(fc_snapshot_ranks_open(paths, N_RANKS, 1, paths, N_RANKS, &other), FC_OK);
    CHECK(!fc_snapshot_ranks_end(other));
    exit_with(3, false);
    CHECK(are_there());
    exit_with(0, true);
    CHECK(are_there());
    exit_with(0, false);
    CHECK(access(names[0], F_OK) != 0 && access(names[1], F_OK) != 0);
    fc_snapshot_ranks_close(other);
}

static void test_memory_runs_out(void)
{
    const int64_t live = fc_alloc_live();
    fc_snapshot_ranks *ranks;
    fc_copier *copier;

    make_files();
    for (int n = 0; n < 6; n++) {
        fc_alloc_fail_after(n);
        if (fc_snapshot_ranks_open(paths, N_RANKS, 0, paths, N_RANKS, &ranks) == FC_OK) {
            fc_snapshot_ranks_close(ranks);
        } else {
            CHECK_EQ(fc_alloc_live(), live);
        }
    }
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_copier_create(&copier), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_EQ(fc_alloc_live(), live);
}

int main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    for (int rank = 0; rank < N_RANKS; rank++) {
        (void)snprintf(names[rank], sizeof(names[rank]), "%s/%d", folder, rank);
    }
    test_sums();
    test_copies();
    test_copies_of_who_waits();
    test_commits();
    test_awaited();
    test_many_pieces();
    test_torn();
    test_adopted();
    test_killed();
    test_children_let_go();
    test_ranks();
    test_exits();
    test_memory_runs_out();
    for (int rank = 0; rank < N_RANKS; rank++) {
        (void)unlink(names[rank]);
    }
    (void)rmdir(folder);
    return check_result();
}
