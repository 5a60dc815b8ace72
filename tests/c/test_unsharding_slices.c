/* Units that forward reshards to slices of a smaller group. `arg`: whether in shared memory. */
#define _GNU_SOURCE

#include "unsharding_world.h"

static fc_status reshard_to_slice(world *w, size_t u)
{
    return fc_unsharding_reshard(w->owners[u].unsharding, true);
}

/* This rank's rows of what all ranks had in that step. */
static void check_slices(const world *w, size_t u, int step)
{
    const owner *o = &w->owners[u];
    const size_t chunk = (ROWS + SLICE_RANKS - 1) / SLICE_RANKS;
    const size_t first = (size_t)(w->rank % SLICE_RANKS) * chunk;
    const size_t rows = first + chunk > ROWS ? ROWS - first : chunk;

    CHECK(o->slices != NULL && !o->is_entered);
    for (size_t i = 0; o->slices != NULL && i < N_PARAMS; i++) {
        const fc_param *p =
            &(w->is_mapped ? o->layout : fc_unit_layout(fc_domain_unit(w->small, u)))->params[i];
        const size_t row = COLUMNS * fc_dtype_bytes(computed[i]);
        float own[ROWS * COLUMNS];

        fc_kern_cast(computed[i], FC_F32)(
            own, o->slices + (w->is_mapped ? p->full_at + first * row : p->pack_at),
            rows * COLUMNS);
        for (size_t k = 0; k < rows * COLUMNS; k++) {
            CHECK(own[k] == value_of(step, u, i, first * COLUMNS + k));
        }
    }
}

static void forward_to_slices(world *w, int step)
{
    write_shards(w, step);
    open(w, FC_PHASE_FORWARD);
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_OK(unshard(w, u));
        check_values(w, u, step);
        CHECK_OK(reshard_to_slice(w, u));
        CHECK_STATE(w, u, SLICED);
        CHECK(!fc_unsharding_is_settled(w->owners[u].unsharding));
    }
    close_phase(w);
    for (size_t u = 0; u < N_UNITS; u++) {
        check_slices(w, u, step);
    }
}

/* Each forward leaves slices of a smaller group; backward gathers from them, over messages between
 * the ranks of that group alone. */
static void body_slices(int rank, int n_ranks, void *arg)
{
    world w;
    uint64_t gathered;

    join(&w, rank, n_ranks, *(const bool *)arg);
    for (int step = 0; step < N_STEPS; step++) {
        forward_to_slices(&w, step);
        gathered = w.owners[0].traffic.gathered;
        open(&w, FC_PHASE_BACKWARD);
        for (size_t u = 0; u < N_UNITS; u++) {
            CHECK_OK(unshard(&w, u));
            CHECK(!fc_unsharding_has_slices(w.owners[u].unsharding));
            check_values(&w, u, step);
            if (!w.is_mapped && step > 0 && u == 0) { /* those of its group came along */
                CHECK_STATE(&w, 1, AHEAD);
                CHECK(fc_unsharding_has_slices(w.owners[1].unsharding));
            }
            CHECK_OK(reshard(&w, u));
            CHECK_STATE(&w, u, SHARDED);
        }
        close_phase(&w);
        gathered = w.owners[0].traffic.gathered - gathered;
        CHECK(gathered < w.owners[0].traffic.gathered / (2 * (uint64_t)step + 1) || w.is_mapped);
    }
    /* With what all ranks gather none of them comes along. */
    forward_to_slices(&w, N_STEPS);
    CHECK_OK(reshard(&w, 0));
    open(&w, FC_PHASE_BACKWARD);
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_OK(unshard(&w, u));
        CHECK(u > 0 || fc_unsharding_state_of(w.owners[1].unsharding) == FC_UNIT_SLICED);
        check_values(&w, u, N_STEPS);
        CHECK_OK(reshard(&w, u));
    }
    close_phase(&w);
    leave_world(&w);
}

/* Slices are left: by a reshard, by a use in a forward, by nobody at all. */
static void body_slices_end(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    forward_to_slices(&w, 0);
    CHECK_OK(reshard_to_slice(&w, 0)); /* nothing is to be done */
    CHECK_STATE(&w, 0, SLICED);
    o->fails = true;
    CHECK_EQ(reshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, SLICED);
    CHECK_OK(reshard(&w, 0));
    CHECK_STATE(&w, 0, SHARDED);
    CHECK(o->slices == NULL);
    /* Outside of a phase it is the shards that are gathered. */
    CHECK_OK(fc_unsharding_gather(w.owners[1].unsharding));
    CHECK_STATE(&w, 1, GATHERED);
    fc_unsharding_drop(w.owners[1].unsharding);
    CHECK_STATE(&w, 1, SLICED);
    CHECK_OK(unshard(&w, 1));
    CHECK_STATE(&w, 1, KEPT);
    CHECK(!fc_unsharding_has_slices(w.owners[1].unsharding));
    CHECK_OK(reshard(&w, 1));
    /* So in the next forward: they may have been written since. */
    CHECK_OK(barrier(&w.host));
    forward_to_slices(&w, 1);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 1);
    o->fails = true;
    CHECK_EQ(reshard_to_slice(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, UNSHARDED);
    CHECK_OK(reshard(&w, 0));
    CHECK_OK(unshard(&w, 0)); /* from shards, now that the slices are gone */
    check_values(&w, 0, 1);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* What is written to slices in shared memory is not what a backward reads, nor who reads behind a
 * reshard. */
static void body_slices_written(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    for (int is_left = 0; is_left < 2; is_left++) {
        for (size_t written = 0; written < 3; written++) { /* the first, the second, both */
            forward_to_slices(&w, 0);
            for (size_t i = 0; i < N_PARAMS; i++) {
                if (written == 2 || written == i) {
                    memset((char *)(uintptr_t)o->slices + o->layout->params[i].full_at, 0x3f, 8);
                    o->is_slice_written[i] = true;
                }
            }
            if (is_left) {
                CHECK_OK(reshard(&w, 0));
                CHECK(!fc_unsharding_has_slices(o->unsharding));
            }
            open(&w, FC_PHASE_BACKWARD);
            CHECK_OK(unshard(&w, 0));
            check_values(&w, 0, 0);
            CHECK_OK(reshard(&w, 0));
            close_phase(&w);
            CHECK_OK(barrier(&w.host)); /* peers have read the shards */
        }
    }
    leave_world(&w);
}

/* Over messages slices have a slot of their own while they are shown. */
static void body_slices_memory(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];
    size_t slices, whole;

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    fc_batch_limit(w.small, 0);
    whole = o->layout->full_bytes;
    slices = fc_round_up(fc_unit_layout(fc_domain_unit(w.small, 0))->pack_bytes, FC_PAGE);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    fc_slots_trim(w.slots);
    fc_alloc_fail_after(0);
    CHECK_EQ(reshard_to_slice(&w, 0), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_STATE(&w, 0, UNSHARDED);
    check_values(&w, 0, 0);
    o->fails = true;
    CHECK_EQ(reshard_to_slice(&w, 0), FC_ERR_INTERRUPTED);
    CHECK(!fc_unsharding_has_slices(o->unsharding));
    fc_slots_trim(w.slots);
    CHECK_EQ(fc_slots_bytes(w.slots), whole);
    CHECK_OK(reshard_to_slice(&w, 0));
    CHECK(fc_unsharding_has_slices(o->unsharding));
    fc_slots_trim(w.slots);
    CHECK_EQ(fc_slots_bytes(w.slots), slices);
    CHECK_OK(reshard(&w, 0));
    CHECK(!fc_unsharding_has_slices(o->unsharding));
    fc_slots_trim(w.slots);
    CHECK_EQ(fc_slots_bytes(w.slots), 0);
    close_phase(&w);
    leave_world(&w);
}

/* Over messages a gather between the ranks of a smaller group brings nobody along who has no
 * slices. */
static void body_slices_alike(int rank, int n_ranks, void *arg)
{
    world w;
    uint64_t copied;

    join(&w, rank, n_ranks, *(const bool *)arg);
    for (int step = 0; step < 2; step++) {
        write_shards(&w, step);
        open(&w, FC_PHASE_FORWARD);
        for (size_t u = 0; u < N_UNITS; u++) {
            CHECK_OK(unshard(&w, u));
            CHECK_OK(fc_unsharding_reshard(w.owners[u].unsharding, u != 1));
        }
        close_phase(&w);
        open(&w, FC_PHASE_BACKWARD);
        copied = w.owners[0].traffic.copied;
        CHECK_OK(unshard(&w, 0));
        CHECK_EQ(w.owners[0].traffic.copied - copied,
                 w.owners[0].layout->full_bytes +
                     fc_unit_layout(fc_domain_unit(w.small, 0))->pack_bytes);
        check_values(&w, 0, step);
        CHECK_STATE(&w, 1, SHARDED);
        CHECK_EQ(fc_unsharding_state_of(w.owners[2].unsharding),
                 step == 0 ? FC_UNIT_SLICED : FC_UNIT_AHEAD);
        CHECK_OK(reshard(&w, 0));
        for (size_t u = 1; u < N_UNITS; u++) {
            CHECK_OK(unshard(&w, u));
            check_values(&w, u, step);
            CHECK_OK(reshard(&w, u));
        }
        close_phase(&w);
    }
    leave_world(&w);
}

int main(void)
{
    static bool kinds[] = {true, false};

    for (size_t k = 0; k < 2; k++) {
        ranks_check(4, body_slices, &kinds[k]);
        ranks_check(4, body_slices_end, &kinds[k]);
    }
    ranks_check(4, body_slices_written, &kinds[0]);
    ranks_check(4, body_slices_memory, &kinds[1]);
    ranks_check(4, body_slices_alike, &kinds[1]);
    return check_result();
}
