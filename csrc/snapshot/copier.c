/* Pieces are cut into runs, which whoever waits for something takes in turn: for a peer, or for the
 * copy. The thread takes what is left when most of the time is over that the last copy had, so that
 * it does not take a processor from those that compute.
 */
#include "snapshot/copier.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/idle.h"
#include "base/threads.h"
#include "snapshot/snapshot_private.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

/* Long enough to be copied at full speed, short enough that who waits finds something to do. */
#define RUN_BYTES ((size_t)1 << 20)
/* Of who may be needed elsewhere at any time. */
#define IDLE_BYTES ((size_t)1 << 16)

/* A kill loses no more than that beside what it loses anyway. */
#define LATEST_NS FC_NS_PER_S

/* Between questions for a commit. */
#define FIRST_PAUSE_NS FC_NS_PER_MS
#define LAST_PAUSE_NS (128 * FC_NS_PER_MS)

struct fc_copier {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pid_t pid; /* of the process whose thread it is */
    bool is_ending;

    /* The copy under way, or the last one. */
    fc_snapshot_job job;
    fc_snapshot_facts facts;
    fc_snapshot_piece *pieces; /* owned */
    size_t room;               /* of `pieces` */
    size_t next, next_byte;    /* what nobody has taken yet */
    size_t n_at_work;          /* runs that are being copied */
    fc_sums data, index;
    bool is_busy;              /* memory is being read */
    int64_t began_ns, had_ns;  /* and how long the last copy had */
    int64_t turn_ns;           /* when the thread begins */
    bool is_offered;           /* to whoever waits */
    bool is_judged, counts;    /* whether it is known if the snapshot counts */
    bool is_there, is_awaited; /* the memory of pieces; a thread sees to it */
};

typedef struct run {
    const fc_snapshot_piece *piece;
    size_t begin, bytes;
} run;

/* ---- with the lock held ---- */

static bool take_run(fc_copier *c, size_t at_most, run *out)
{
    const fc_snapshot_piece *piece;

    while (c->is_busy && c->next < c->job.n_pieces) {
        piece = &c->pieces[c->next];
        if (!piece->is_now && c->next_byte < piece->bytes) {
            const size_t left = piece->bytes - c->next_byte;

            *out = (run){piece, c->next_byte, left < at_most ? left : at_most};
            c->next_byte += out->bytes;
            c->n_at_work++;
            return true;
        }
        c->next++;
        c->next_byte = 0;
    }
    return false;
}

static void add_sums(fc_sums *to, const fc_sums *part)
{
    for (int lane = 0; lane < FC_SUM_LANES; lane++) {
        to->plain[lane] += part->plain[lane];
        to->weighted[lane] += part->weighted[lane];
    }
}

/* After the last run. */
static void complete(fc_copier *c)
{
    c->is_busy = false;
    c->is_judged = !c->is_there;
    (void)pthread_cond_broadcast(&c->changed);
}

/* In the owner's thread: this one cannot see a write that is under way. */
static void judge(fc_copier *c)
{
    if (c->is_busy || c->is_judged) {
        return;
    }
    c->is_judged = true;
    c->counts = c->job.is_unchanged(c->job.owner);
    if (c->counts) {
        fc_snapshot_commit(c->job.file, &c->facts, &c->data, &c->index);
    }
}

static bool is_copied(const fc_copier *c)
{
    return c->is_busy && c->next == c->job.n_pieces && c->n_at_work == 0;
}

/* ---- */

static void copy_part(const fc_copier *c, const fc_snapshot_piece *piece, size_t begin,
                      size_t bytes, fc_sums *sums)
{
    const size_t at = piece->at + begin;

    fc_sums_copy(sums, fc_snapshot_data(c->job.file) + at, (const char *)piece->memory + begin,
                 bytes, at / FC_SUM_ROW, fc_snapshot_rows(c->facts.data_bytes));
}

/* With the lock held, which is given away meanwhile. */
static void await_memory(fc_copier *c)
{
    bool is_there;

    while (c->is_busy && c->is_awaited) {
        (void)pthread_cond_wait(&c->changed, &c->lock);
    }
    if (!c->is_busy || c->is_there) {
        return;
    }
    c->is_awaited = true;
    (void)pthread_mutex_unlock(&c->lock);
    is_there = c->job.await(c->job.owner);
    (void)pthread_mutex_lock(&c->lock);
    c->is_awaited = false;
    c->is_there = is_there;
    if (!is_there) {
        c->next = c->job.n_pieces; /* nothing is left to copy */
    }
    (void)pthread_cond_broadcast(&c->changed);
}

/* The lock is given away meanwhile. */
static void copy_run(fc_copier *c, const run *part)
{
    fc_sums sums = {0};

    (void)pthread_mutex_unlock(&c->lock);
    copy_part(c, part->piece, part->begin, part->bytes, &sums);
    (void)pthread_mutex_lock(&c->lock);
    add_sums(&c->data, &sums);
    c->n_at_work--;
}

/* Takes runs until there are none; the lock is held between them. */
static void copy_runs(fc_copier *c)
{
    run part;

    await_memory(c);
    while (take_run(c, RUN_BYTES, &part)) {
        copy_run(c, &part);
    }
    if (is_copied(c)) {
        complete(c);
    }
}

/* Of any thread that waits. */
static bool copy_a_little(void *copier)
{
    fc_copier *c = copier;
    bool is_found;
    run part;

    if (c->pid != getpid()) {
        return false;
    }
    (void)pthread_mutex_lock(&c->lock);
    is_found = take_run(c, IDLE_BYTES, &part);
    if (is_found) {
        copy_run(c, &part);
    }
    if (is_copied(c)) {
        complete(c);
    }
    (void)pthread_mutex_unlock(&c->lock);
    return is_found;
}

static void await_turn(fc_copier *c)
{
    while (c->is_busy && !c->is_ending && fc_now_ns() < c->turn_ns) {
        (void)fc_condition_wait(&c->changed, &c->lock, c->turn_ns);
    }
}

/* Whether it has waited for an answer, and things may be different now. */
static bool ask(fc_copier *c)
{
    int64_t pause_ns = FIRST_PAUSE_NS;
    bool has_waited = false;

    while (!c->is_busy && !c->is_judged && !c->is_ending && c->job.ask_for_commit != NULL) {
        c->job.ask_for_commit(c->job.owner);
        (void)fc_condition_wait(&c->changed, &c->lock, fc_deadline_ns(pause_ns));
        pause_ns = pause_ns < LAST_PAUSE_NS ? 2 * pause_ns : LAST_PAUSE_NS;
        has_waited = true;
    }
    return has_waited;
}

static void *work(void *copier)
{
    fc_copier *c = copier;

    (void)pthread_mutex_lock(&c->lock);
    while (!c->is_ending) {
        await_turn(c);
        copy_runs(c);
        if (!ask(c) && !c->is_ending) {
            (void)pthread_cond_wait(&c->changed, &c->lock);
        }
    }
    (void)pthread_mutex_unlock(&c->lock);
    return NULL;
}

fc_status fc_copier_create(fc_copier **out)
{
    fc_copier *c = fc_alloc(1, sizeof(*c));
    int code;

    if (c == NULL) {
        return fc_fail(FC_ERR_NOMEM, "snapshots: out of memory");
    }
    (void)pthread_mutex_init(&c->lock, NULL);
    fc_condition_init(&c->changed);
    c->pid = getpid();
    c->is_judged = true;
    code = fc_thread_start(NULL, work, c, &c->thread);
    if (code != 0) {
        fc_free(c);
        return fc_fail_errno(FC_ERR_SYSTEM, code, "snapshots: no thread");
    }
    *out = c;
    return FC_OK;
}

void fc_copier_destroy(fc_copier *c)
{
    if (c == NULL) {
        return;
    }
    if (c->pid == getpid()) {
        (void)fc_copier_finish(c);
        (void)pthread_mutex_lock(&c->lock);
        c->is_ending = true;
        (void)pthread_cond_broadcast(&c->changed);
        (void)pthread_mutex_unlock(&c->lock);
        (void)pthread_join(c->thread, NULL);
        (void)pthread_cond_destroy(&c->changed);
        (void)pthread_mutex_destroy(&c->lock);
    }
    fc_free(c->pieces);
    fc_free(c);
}

static fc_status check_idle(fc_copier *c)
{
    bool is_over;

    (void)pthread_mutex_lock(&c->lock);
    is_over = !c->is_busy && c->is_judged;
    (void)pthread_mutex_unlock(&c->lock);
    return !is_over ? fc_fail(FC_ERR_STATE, "snapshots: a copy is under way") : FC_OK;
}

static fc_status keep_pieces(fc_copier *c, const fc_snapshot_job *job)
{
    if (job->n_pieces > c->room) {
        fc_snapshot_piece *pieces = fc_alloc(job->n_pieces, sizeof(*pieces));

        if (pieces == NULL) {
            return fc_fail(FC_ERR_NOMEM, "snapshots: out of memory");
        }
        fc_free(c->pieces);
        c->pieces = pieces;
        c->room = job->n_pieces;
    }
    if (job->n_pieces > 0) {
        memcpy(c->pieces, job->pieces, job->n_pieces * sizeof(*job->pieces));
    }
    return FC_OK;
}

fc_status fc_copier_start(fc_copier *c, const fc_snapshot_job *job)
{
    const fc_snapshot_piece *last = job->n_pieces > 0 ? &job->pieces[job->n_pieces - 1] : NULL;
    char *index;

    FC_TRY(check_idle(c));
    FC_TRY(keep_pieces(c, job));
    c->job = *job;
    c->job.pieces = NULL;
    c->facts =
        (fc_snapshot_facts){.sequence = job->sequence,
                            .step = job->step,
                            .data_bytes = last ? last->at + fc_round_up(last->bytes, FC_ALIGN) : 0,
                            .index_bytes = job->index_bytes};
    c->data = c->index = (fc_sums){0};
    fc_snapshot_clear(job->file);
    index = fc_snapshot_data(job->file) + c->facts.data_bytes;
    fc_sums_copy(&c->index, NULL, job->index, job->index_bytes, 0,
                 fc_snapshot_rows(job->index_bytes));
    memcpy(index, job->index, job->index_bytes);
    for (size_t i = 0; i < job->n_pieces; i++) {
        if (c->pieces[i].is_now) {
            copy_part(c, &c->pieces[i], 0, c->pieces[i].bytes, &c->data);
        }
    }
    (void)pthread_mutex_lock(&c->lock);
    c->next = c->next_byte = 0;
    c->is_judged = c->counts = false;
    c->is_there = job->await == NULL;
    c->is_busy = true;
    c->began_ns = fc_now_ns();
    c->turn_ns = c->began_ns;
    c->is_offered = c->is_there && fc_idle_begin(copy_a_little, c);
    if (c->is_offered) {
        c->turn_ns += c->had_ns / 4 * 3 < LATEST_NS ? c->had_ns / 4 * 3 : LATEST_NS;
    }
    (void)pthread_cond_broadcast(&c->changed);
    (void)pthread_mutex_unlock(&c->lock);
    return FC_OK;
}

void fc_copier_commit(fc_copier *c)
{
    if (c->pid == getpid()) {
        (void)pthread_mutex_lock(&c->lock);
        judge(c);
        (void)pthread_mutex_unlock(&c->lock);
    }
}

bool fc_copier_finish(fc_copier *c)
{
    bool counts;

    if (c->pid != getpid()) {
        return false;
    }
    if (c->is_offered) {
        fc_idle_end(c);
        c->is_offered = false;
    }
    (void)pthread_mutex_lock(&c->lock);
    if (c->began_ns != 0) {
        c->had_ns = fc_now_ns() - c->began_ns;
        c->began_ns = 0;
    }
    copy_runs(c);
    while (c->is_busy) {
        (void)pthread_cond_wait(&c->changed, &c->lock);
    }
    judge(c);
    counts = c->counts;
    (void)pthread_mutex_unlock(&c->lock);
    return counts;
}
