/* Ranks meet before each collective of a device: rank 0 runs a unit, and rank 1 comes to the
 * meetings that there have to be, in that order and to no other.
 */
#define _GNU_SOURCE

#include "device/sim/sim.h"
#include "domains.h"
#include "engine/schedule.h"
#include "refused_messages.h"

#define STREAMS 5
#define PRESENT 77 /* a fingerprint of gradients */

typedef struct world {
    ranks_host host, watch_host;
    fc_transport *watch, *transport;
    fc_domain *shard, *replicate;
    fc_unit *shard_unit, *replicate_unit;
    /* Of rank 0. */
    fc_sim *sim;
    fc_schedule *schedule;
    fc_schedule_unit *unit;
    fc_param param;
    fc_layout layout;
    const void *shards[1], *grads[1];
    void *out;
} world;

static void join_domain(world *w, int rank, fc_domain_kind kind, const char *name, fc_domain **out)
{
    fc_param param = make_param(1, 8, 8, FC_F32, true);
    const fc_unit_desc unit = {name, &param, 1};

    CHECK_OK(fc_domain_create(w->transport, kind, &unit, 1, rank, 2, out));
    CHECK_OK(fc_domain_watch(*out, w->watch));
    fc_domain_open(*out, (fc_opening){FC_PHASE_FORWARD, 0, FC_UPDATES_UNKNOWN});
}

static void *memory(fc_device *device, fc_stream *stream)
{
    void *made = NULL;

    CHECK_OK(device->ops->alloc(device, stream, (fc_label){"world", "memory", 0}, 4096, &made));
    return made;
}

/* A unit of one rank of two, on a device of its own, with slices for itself. */
static void make_unit(world *w)
{
    static const char *const names[] = {"compute", "copy-in", "gather", "reduce", "all-reduce"};
    const int ranks[1] = {0};
    fc_device_comm *comm = NULL;
    fc_stream *streams[STREAMS];
    fc_device *device;

    CHECK_OK(fc_sim_create(1, 1, &w->sim));
    device = fc_sim_device(w->sim, 0);
    CHECK_OK(fc_sim_comm_create(w->sim, "comm", ranks, 1, &comm));
    for (int i = 0; i < STREAMS; i++) {
        CHECK_OK(fc_sim_stream_create(w->sim, 0, names[i], &streams[i]));
    }
    w->param = make_param(1, 8, 8, FC_F32, true);
    CHECK_OK(fc_layout_init(&w->layout, &w->param, 1, 0, 2, false));
    CHECK_OK(fc_schedule_create(
        &(fc_schedule_options){device, streams[1], streams[2], streams[3], streams[4], 1, 0, 0},
        &w->schedule));
    CHECK_OK(fc_schedule_add(w->schedule,
                             &(fc_schedule_unit_options){.name = "unit",
                                                         .layout = &w->layout,
                                                         .gather = comm,
                                                         .reduce = comm,
                                                         .replicas = comm,
                                                         .reshard_after_forward = true,
                                                         .n_post_ranks = 1,
                                                         .post_gather = comm,
                                                         .pre_divisor = 1,
                                                         .divisor = 1,
                                                         .shard_unit = w->shard_unit,
                                                         .replicate_unit = w->replicate_unit},
                             &w->unit));
    w->shards[0] = memory(device, streams[0]);
    w->grads[0] = memory(device, streams[0]);
    w->out = memory(device, streams[0]);
    fc_schedule_set_shards(w->unit, w->shards);
    CHECK_OK(fc_schedule_begin(w->schedule, streams[0], NULL));
}

static void join(world *w, int rank, int n_ranks)
{
    fc_transport_config config;

    (void)alarm(DOMAINS_WATCHDOG_S);
    *w = (world){.sim = NULL};
    config = ranks_config(&w->watch_host, 0, rank, n_ranks, DOMAINS_TIMEOUT_NS);
    CHECK_OK(fc_shm_create(&config, &w->watch));
    config = ranks_config(&w->host, 1, rank, n_ranks, DOMAINS_TIMEOUT_NS);
    CHECK_OK(fc_callback_create(&config, &refused_messages, &w->transport));
    join_domain(w, rank, FC_DOMAIN_SHARD, "sharded", &w->shard);
    join_domain(w, rank, FC_DOMAIN_REPLICATE, "replicated", &w->replicate);
    w->shard_unit = fc_domain_unit(w->shard, 0);
    w->replicate_unit = fc_domain_unit(w->replicate, 0);
    if (rank == 0) {
        make_unit(w);
    }
}

static void leave(world *w)
{
    fc_schedule_destroy(w->schedule);
    fc_sim_destroy(w->sim);
    fc_domain_destroy(w->shard);
    fc_domain_destroy(w->replicate);
    fc_transport_destroy(w->transport);
    fc_transport_destroy(w->watch);
    CHECK_EQ(fc_alloc_live(), 0);
}

static fc_status post(world *w, bool is_fresh, fc_schedule_sync sync, bool *reduced_out)
{
    return fc_schedule_post_backward(
        w->unit,
        &(fc_schedule_grads){
            .full = is_fresh ? w->grads : NULL, .out = w->out, .sync = sync, .present = PRESENT},
        reduced_out);
}

/* What rank 0 gives at each end of a backward, and which meetings that takes. */
typedef struct post_case {
    bool is_fresh;
    fc_schedule_sync sync;
    bool scatters, all_reduces;
} post_case;

static const post_case posts[] = {
    {false, FC_SYNC_ALL, false, false}, /* nothing is there */
    {true, FC_SYNC_ALL, true, true},
    {true, FC_SYNC_NONE, false, false}, /* held */
    {false, FC_SYNC_ALL, true, true},   /* what was held */
    {true, FC_SYNC_NONE, false, false},
    {true, FC_SYNC_ALL, true, true}, /* together */
    {true, FC_SYNC_SCATTER, true, false},
    {false, FC_SYNC_SCATTER, false, false}, /* it is scattered */
    {false, FC_SYNC_NONE, false, false},
    {false, FC_SYNC_ALL, false, true},
    {true, FC_SYNC_SCATTER, true, false},
    {true, FC_SYNC_ALL, true, true},
};

/* Nobody is in another meeting than this one. */
static void meet_at_last(world *w)
{
    CHECK_OK(fc_domain_meet(w->shard_unit, "all-gather", 5));
    CHECK_OK(fc_domain_meet(w->replicate_unit, "all-gather", 5));
}

static void body_sums(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks);
    for (size_t i = 0; i < sizeof(posts) / sizeof(posts[0]); i++) {
        const post_case *c = &posts[i];
        bool is_reduced;

        if (rank == 0) {
            CHECK_OK(post(&w, c->is_fresh, c->sync, &is_reduced));
            CHECK_EQ(is_reduced, c->all_reduces);
            continue;
        }
        if (c->scatters) {
            CHECK_OK(fc_domain_meet(w.shard_unit, "reduce-scatter", PRESENT));
        }
        if (c->all_reduces) {
            CHECK_OK(fc_domain_meet(w.replicate_unit, "all-reduce", PRESENT));
        }
    }
    meet_at_last(&w);
    leave(&w);
}

/* Each gather is met for, also where a smaller group makes it of slices. */
static void body_gathers(int rank, int n_ranks, void *arg)
{
    world w;
    void *full;

    (void)arg;
    join(&w, rank, n_ranks);
    if (rank == 0) {
        CHECK_OK(fc_schedule_pre_forward(w.unit, &full));
        CHECK_OK(fc_schedule_post_forward(w.unit));
        CHECK_OK(fc_schedule_pre_backward(w.unit, &full));
    } else {
        CHECK_OK(fc_domain_meet(w.shard_unit, "all-gather", 0));
        CHECK_OK(fc_domain_meet(w.shard_unit, "all-gather", 0));
    }
    meet_at_last(&w);
    leave(&w);
}

/* A peer has gradients of other parameters: nothing is begun, and nothing is held of it. `arg`: in
 * the sum over replicas. */
static void body_sums_apart(int rank, int n_ranks, void *arg)
{
    const bool is_replicas = *(const bool *)arg;
    world w;
    bool is_reduced = true;

    join(&w, rank, n_ranks);
    if (rank == 0) {
        CHECK_EQ(post(&w, true, FC_SYNC_ALL, &is_reduced), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), is_replicas
                                         ? "in the all-reduce of unit replicated with grad"
                                         : "in the reduce-scatter of unit sharded with grad");
        CHECK(!is_reduced);
        CHECK_OK(post(&w, false, FC_SYNC_ALL, &is_reduced));
        CHECK(!is_reduced);
    } else if (is_replicas) {
        CHECK_OK(fc_domain_meet(w.shard_unit, "reduce-scatter", PRESENT));
        CHECK_EQ(fc_domain_meet(w.replicate_unit, "all-reduce", 1), FC_ERR_MISMATCH);
    } else {
        CHECK_EQ(fc_domain_meet(w.shard_unit, "reduce-scatter", 1), FC_ERR_MISMATCH);
    }
    leave(&w);
}

static void body_gathers_apart(int rank, int n_ranks, void *arg)
{
    world w;
    void *full = NULL;

    (void)arg;
    join(&w, rank, n_ranks);
    if (rank == 0) {
        CHECK_EQ(fc_schedule_unshard(w.unit, &full), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "rank 10 is in the all-gather of unit sharded and rank 11 in "
                                     "the reduce-scatter of unit sharded");
        CHECK(full == NULL);
    } else {
        CHECK_EQ(fc_domain_meet(w.shard_unit, "reduce-scatter", 0), FC_ERR_MISMATCH);
    }
    leave(&w);
}

int main(void)
{
    static bool is_replicas[] = {false, true};

    ranks_check(2, body_sums, NULL);
    ranks_check(2, body_gathers, NULL);
    for (int i = 0; i < 2; i++) {
        ranks_check(2, body_sums_apart, &is_replicas[i]);
    }
    ranks_check(2, body_gathers_apart, NULL);
    return check_result();
}
