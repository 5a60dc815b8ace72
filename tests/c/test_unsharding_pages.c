/* Writes to shared units whose parameters have pages of their own: each is taken back. */
#define _GNU_SOURCE

#define ROWS 2048

#include "unsharding_world.h"

static void overwrite(const char *of, const owner *o, size_t param)
{
    memset((char *)(uintptr_t)of + o->layout->params[param].full_at, 0x3f, 8);
}

static void body_whole(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[1];

    (void)arg;
    join(&w, rank, n_ranks, true);
    write_shards(&w, 0);
    for (unsigned maybe = 0; maybe < 4; maybe++) { /* of each, whether the owner is sure */
        open(&w, FC_PHASE_FORWARD);
        CHECK_OK(unshard(&w, 1));
        check_values(&w, 1, 0);
        for (size_t i = 0; i < N_PARAMS; i++) {
            overwrite(o->shown, o, i);
            *((maybe >> i & 1) != 0 ? &o->may_be_written[i] : &o->is_written[i]) = true;
        }
        CHECK_OK(reshard(&w, 1));
        CHECK_OK(unshard(&w, 1));
        check_values(&w, 1, 0);
        CHECK_OK(reshard(&w, 1));
        close_phase(&w);
    }
    leave_world(&w);
}

static void body_slices(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[1];

    (void)arg;
    join(&w, rank, n_ranks, true);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 1));
    CHECK_OK(fc_unsharding_reshard(o->unsharding, true));
    close_phase(&w);
    for (size_t i = 0; i < N_PARAMS; i++) {
        overwrite(o->slices, o, i);
        o->is_slice_written[i] = true;
    }
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 0);
    CHECK_OK(reshard(&w, 1));
    close_phase(&w);
    leave_world(&w);
}

int main(void)
{
    ranks_check(2, body_whole, NULL);
    ranks_check(2, body_slices, NULL);
    return check_result();
}
