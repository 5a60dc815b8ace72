/* Making and running a simulation: ranks take turns, and whoever waits lets the others work. */
#include "device/sim/sim_private.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

/* ---- making ---- */

fc_status fc_sim_stream_create(fc_sim *sim, int rank, const char *name, fc_stream **out)
{
    fc_sim_rank *device = &sim->devices[rank];
    fc_stream *stream;

    if (device->n_streams == FC_SIM_STREAMS) {
        return fc_fail(FC_ERR_INVALID, "simulator: more than %d streams", FC_SIM_STREAMS);
    }
    stream = fc_alloc(1, sizeof(*stream));
    if (stream == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: stream '%s'", name);
    }
    stream->device = device;
    stream->name = name;
    stream->index = device->n_streams++;
    stream->laziness = (unsigned)fc_sim_draw(sim, 9);
    device->streams[stream->index] = stream;
    *out = stream;
    return FC_OK;
}

fc_status fc_sim_create(int n_ranks, uint64_t seed, fc_sim **out)
{
    fc_stream *host;
    fc_sim *sim;
    int rank;

    if (n_ranks < 1 || n_ranks > FC_SIM_RANKS) {
        return fc_fail(FC_ERR_INVALID, "simulator: %d ranks", n_ranks);
    }
    sim = fc_alloc(1, sizeof(*sim));
    if (sim == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator");
    }
    sim->n_ranks = n_ranks;
    sim->random = seed;
    sim->haste = (unsigned)fc_sim_draw(sim, 9);
    sim->jumpiness = (unsigned)fc_sim_draw(sim, 5);
    pthread_mutex_init(&sim->lock, NULL);
    pthread_cond_init(&sim->turned, NULL);
    for (rank = 0; rank < n_ranks; rank++) {
        fc_sim_rank *device = &sim->devices[rank];
        fc_status st;

        device->base.ops = &fc_sim_ops;
        device->sim = sim;
        device->rank = rank;
        device->allocs_left = -1;
        st = fc_sim_stream_create(sim, rank, "host", &host);
        if (st != FC_OK) {
            fc_sim_destroy(sim);
            return st;
        }
    }
    *out = sim;
    return FC_OK;
}

static void stream_destroy(fc_stream *stream)
{
    while (stream->first != NULL) {
        fc_sim_op *next = stream->first->next;

        fc_sim_op_destroy(stream->first);
        stream->first = next;
    }
    fc_free(stream);
}

void fc_sim_destroy(fc_sim *sim)
{
    int rank, i;

    if (sim == NULL) {
        return;
    }
    for (rank = 0; rank < sim->n_ranks; rank++) {
        for (i = 0; i < sim->devices[rank].n_streams; i++) {
            stream_destroy(sim->devices[rank].streams[i]);
        }
        fc_sim_blocks_destroy(&sim->devices[rank]);
    }
    while (sim->comms != NULL) {
        fc_device_comm *next = sim->comms->next;

        fc_sim_comm_destroy(sim->comms);
        sim->comms = next;
    }
    fc_sim_moves_free(sim->moves);
    while (sim->texts != NULL) {
        fc_sim_text *next = sim->texts->next;

        fc_free(sim->texts);
        sim->texts = next;
    }
    pthread_cond_destroy(&sim->turned);
    pthread_mutex_destroy(&sim->lock);
    fc_free(sim);
}

fc_device *fc_sim_device(fc_sim *sim, int rank)
{
    return &sim->devices[rank].base;
}

fc_status fc_sim_comm_create(fc_sim *sim, const char *name, const int *ranks, int n_ranks,
                             fc_device_comm **out)
{
    fc_device_comm *comm = fc_alloc(1, sizeof(*comm));

    if (comm == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: communicator");
    }
    comm->sim = sim;
    comm->name = name;
    comm->n_ranks = n_ranks;
    memcpy(comm->ranks, ranks, (size_t)n_ranks * sizeof(int));
    comm->next = sim->comms;
    sim->comms = comm;
    *out = comm;
    return FC_OK;
}

/* ---- turns ---- */

/* A rank other than `self` whose host can go on, -1 if there is none. */
static int other_ready(fc_sim *sim, int self)
{
    int i, start = (int)fc_sim_draw(sim, (uint64_t)sim->n_ranks);

    for (i = 0; i < sim->n_ranks; i++) {
        int rank = (start + i) % sim->n_ranks;
        const fc_sim_rank *d = &sim->devices[rank];

        if (rank != self && !d->is_finished &&
            (d->waits_for == NULL || d->waits_for->is_done || sim->is_stuck)) {
            return rank;
        }
    }
    return -1;
}

static void give_turn(fc_sim *sim, int rank)
{
    sim->turn = rank;
    pthread_cond_broadcast(&sim->turned);
}

static void await_turn(fc_sim *sim, int rank)
{
    while (sim->turn != rank) {
        pthread_cond_wait(&sim->turned, &sim->lock);
    }
}

void fc_sim_pause(fc_sim_rank *device)
{
    fc_sim *sim = device->sim;
    uint64_t n;
    int other;

    if (fc_sim_draw(sim, 8) < sim->haste) {
        for (n = fc_sim_draw(sim, 4); n > 0 && fc_sim_step(sim); n--) {
        }
    }
    if (sim->body != NULL && fc_sim_draw(sim, 32) < sim->jumpiness) {
        other = other_ready(sim, device->rank);
        if (other >= 0) {
            give_turn(sim, other);
            await_turn(sim, device->rank);
        }
    }
}

/* Where the ranks are, once nothing can go on. */
static void report_stuck(fc_sim *sim)
{
    char text[400] = "";
    size_t used = 0;
    int rank, i;

    sim->is_stuck = true;
    for (rank = 0; rank < sim->n_ranks; rank++) {
        for (i = 0; i < sim->devices[rank].n_streams; i++) {
            const fc_stream *s = sim->devices[rank].streams[i];
            const fc_sim_op *op = s->first;

            if (op == NULL || op->kind != FC_SIM_COLLECTIVE || used >= sizeof(text)) {
                continue;
            }
            used +=
                (size_t)snprintf(text + used, sizeof(text) - used,
                                 "; rank %d, stream '%s': %s %llu of '%s' ('%s' of '%s')", rank,
                                 s->name, op->meeting->kind, (unsigned long long)op->meeting_number,
                                 op->comm->name, op->label.what, op->label.unit);
        }
    }
    fc_sim_report(sim, "deadlock%s", text);
}

fc_status fc_sim_await(fc_sim_rank *device, const fc_sim_mark *mark)
{
    fc_sim *sim = device->sim;
    int other;

    device->waits_for = mark;
    while (!mark->is_done && !sim->is_stuck) {
        if (fc_sim_step(sim)) {
            continue;
        }
        other = sim->body != NULL ? other_ready(sim, device->rank) : -1;
        if (other < 0) {
            report_stuck(sim);
        } else {
            give_turn(sim, other);
            await_turn(sim, device->rank);
        }
    }
    device->waits_for = NULL;
    if (!mark->is_done) {
        return fc_fail(FC_ERR_TIMEOUT, "simulator: rank %d waits for what cannot come",
                       device->rank);
    }
    fc_sim_clock_join(&device->streams[FC_SIM_HOST]->clock, &mark->clock);
    return FC_OK;
}

/* ---- running ---- */

/* The turn goes to a rank that can go on; the devices work until there is one. */
static void leave(fc_sim *sim, int rank)
{
    int other = other_ready(sim, rank), i;
    bool all_finished = true;

    for (i = 0; i < sim->n_ranks; i++) {
        all_finished = all_finished && sim->devices[i].is_finished;
    }
    while (other < 0 && !all_finished) {
        if (!fc_sim_step(sim)) {
            report_stuck(sim);
        }
        other = other_ready(sim, rank);
    }
    if (other >= 0) {
        give_turn(sim, other);
    }
}

static void *run_rank(void *arg)
{
    fc_sim_rank *device = arg;
    fc_sim *sim = device->sim;

    pthread_mutex_lock(&sim->lock);
    await_turn(sim, device->rank);
    device->status = sim->body(&device->base, device->rank, sim->arg);
    if (device->status != FC_OK) {
        fc_sim_report(sim, "rank %d fails: %s", device->rank, fc_last_message());
    }
    device->is_finished = true;
    leave(sim, device->rank);
    pthread_mutex_unlock(&sim->lock);
    return NULL;
}

/* Everything that is still queued, as if the hosts waited for it. */
static fc_status drain(fc_sim *sim)
{
    int rank, i;

    while (fc_sim_step(sim)) {
    }
    for (rank = 0; rank < sim->n_ranks; rank++) {
        fc_stream *host = sim->devices[rank].streams[FC_SIM_HOST];

        for (i = 0; i < sim->devices[rank].n_streams; i++) {
            const fc_stream *stream = sim->devices[rank].streams[i];

            if (stream->first != NULL) {
                report_stuck(sim);
                return fc_fail(FC_ERR_TIMEOUT, "simulator: stream '%s' of rank %d cannot go on",
                               stream->name, rank);
            }
            fc_sim_clock_join(&host->clock, &stream->clock);
        }
    }
    return FC_OK;
}

fc_status fc_sim_run(fc_sim *sim, fc_sim_body body, void *arg)
{
    pthread_t threads[FC_SIM_RANKS];
    fc_status st = FC_OK;
    int rank, n_started;

    sim->body = body;
    sim->arg = arg;
    sim->turn = 0;
    for (rank = 0; rank < sim->n_ranks; rank++) {
        sim->devices[rank].is_finished = false;
        sim->devices[rank].status = FC_OK;
    }
    pthread_mutex_lock(&sim->lock);
    for (n_started = 1; n_started < sim->n_ranks; n_started++) {
        if (pthread_create(&threads[n_started], NULL, run_rank, &sim->devices[n_started]) != 0) {
            break;
        }
    }
    for (rank = n_started; rank < sim->n_ranks; rank++) {
        sim->devices[rank].is_finished = true;
        sim->devices[rank].status = fc_fail(FC_ERR_SYSTEM, "simulator: no thread for a rank");
    }
    pthread_mutex_unlock(&sim->lock);
    (void)run_rank(&sim->devices[0]);
    for (rank = 1; rank < n_started; rank++) {
        pthread_join(threads[rank], NULL);
    }
    sim->body = NULL;
    for (rank = 0; rank < sim->n_ranks && st == FC_OK; rank++) {
        st = sim->devices[rank].status;
    }
    return st != FC_OK ? st : drain(sim);
}
