/* Units of which the owner makes what is gathered. `arg`: whether in shared memory. */
#define _GNU_SOURCE

#include "unsharding_world.h"

/* Its owner is asked once for each phase, or over messages for each gather, and each time makes the
 * whole of what came. */
static void use(world *w, int n_made, int n_filled)
{
    const owner *o = &w->owners[0];

    CHECK_OK(unshard(w, 0));
    CHECK_EQ(o->n_made, n_made);
    CHECK_EQ(o->n_filled, n_filled);
    CHECK_EQ(o->n_forgotten, w->is_mapped ? n_made + n_filled : n_filled);
}

static void begin_backward(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        if (fc_unsharding_is_stale(w->owners[u].unsharding)) {
            CHECK_OK(fc_unsharding_publish(w->owners[u].unsharding));
            fc_unsharding_note_shards(w->owners[u].unsharding);
        }
    }
    open(w, FC_PHASE_BACKWARD);
}

static void body_extended(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0); /* nothing comes along */
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    use(&w, 1, 1);
    CHECK(fc_unsharding_is_read_apart(o->unsharding) &&
          !fc_unsharding_has_own_memory(o->unsharding));
    fc_unsharding_set_graph(o->unsharding, true);
    CHECK_OK(reshard(&w, 0));
    CHECK(o->shown == NULL && o->keeps_size);
    fc_unsharding_set_graph(o->unsharding, false);
    close_phase(&w);
    CHECK_EQ(w.owners[1].n_made, w.is_mapped); /* which nobody uses, and no backward asks for */
    begin_backward(&w);
    use(&w, 2, 2);
    CHECK_EQ(w.owners[1].n_made, w.is_mapped);
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    close_phase(&w);

    /* Kept, it is made anew after a step alone. */
    open(&w, FC_PHASE_FORWARD);
    use(&w, 2, 2);
    CHECK_STATE(&w, 0, KEPT);
    close_phase(&w);
    CHECK_OK(barrier(&w.host));
    write_shards(&w, 1);
    open(&w, FC_PHASE_FORWARD);
    use(&w, 3, 3);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(o->n_made, 4);
    CHECK_STATE(&w, 0, KEPT);
    CHECK_OK(reshard(&w, 0));
    leave_world(&w);
}

/* A failure of either method leaves the unit sharded or gathered; what was made is used again. */
static void body_extended_failing(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    write_shards(&w, 0);
    o->fails_to_make = true;
    CHECK_EQ(fc_unsharding_gather(o->unsharding), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, SHARDED);
    fc_slots_trim(w.slots);
    CHECK_EQ(fc_slots_bytes(w.slots), 0);
    o->fails_to_make = false;
    open(&w, FC_PHASE_FORWARD);
    o->fails_to_fill = o->keeps_size = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK(o->shown == NULL && !o->is_entered && !o->keeps_size);
    o->fails_to_fill = false;
    use(&w, 1, 1);
    CHECK_OK(reshard(&w, 0));
    o->fails_to_fill = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
    fc_unsharding_drop(o->unsharding);
    CHECK_STATE(&w, 0, SHARDED);
    o->fails_to_fill = false;
    close_phase(&w);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(o->n_made, w.is_mapped ? 1 : 2);
    CHECK_EQ(o->n_filled, 2);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* Over messages each gather makes what it sends, also after one that failed. */
static void body_extended_gathers(int rank, int n_ranks, void *arg)
{
    static const fc_phase phases[] = {FC_PHASE_FORWARD, FC_PHASE_BACKWARD};
    world w;
    owner *o = &w.owners[0];

    (void)arg;
    join(&w, rank, n_ranks, false);
    write_shards(&w, 0);
    messages_fail = true;
    CHECK_EQ(fc_unsharding_gather(o->unsharding), FC_ERR_GROUP);
    CHECK_EQ(fc_unsharding_gather(o->unsharding), FC_ERR_GROUP);
    messages_fail = false;
    CHECK_EQ(o->n_made, 2);
    CHECK_EQ(o->n_forgotten, 0);
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(o->n_made, 3);
    CHECK_EQ(o->n_filled, 1);
    CHECK_OK(barrier(&w.host));
    write_shards(&w, 1);
    open(&w, FC_PHASE_FORWARD); /* which it follows, or fails and is as it was */
    o->fails_to_fill = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, KEPT);
    o->fails_to_fill = false;
    CHECK_OK(reshard(&w, 0));
    CHECK(!fc_unsharding_is_stale(o->unsharding)); /* a backward gathers anyway */
    close_phase(&w);

    /* Others bring it along in a backward, when no owner writes its shards. */
    for (int step = 0; step < N_STEPS; step++) {
        for (size_t p = 0; p < 2; p++) {
            open(&w, phases[p]);
            for (size_t u = 0; u < N_UNITS; u++) {
                CHECK_OK(unshard(&w, u));
                CHECK_EQ(fc_order_n_ahead(w.domain), p == 1 && step > 0 ? N_UNITS - 1 - u : 0);
                CHECK_OK(reshard(&w, u));
            }
            close_phase(&w);
        }
    }
    leave_world(&w);
}

/* A kept one follows its shards, or says that it cannot; their bytes say nothing of it. */
static void body_extended_kept(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    o->writes[0]++;
    CHECK_OK(unshard(&w, 0));
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    close_phase(&w);
    CHECK_OK(barrier(&w.host));
    write_shards(&w, 1);
    open(&w, FC_PHASE_FORWARD);
    CHECK(!fc_order_is_learnt(w.domain) || w.is_mapped);
    o->fails_to_fill = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, KEPT);
    o->fails_to_fill = false;
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(o->n_made, w.is_mapped ? 3 : 2); /* in shared memory for the write, too */
    CHECK_EQ(o->n_filled, 2);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* Nor are they begun before they are asked for. */
static void body_extended_large(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    can_begin = true;
    n_begun = 0;
    join(&w, rank, n_ranks, false);
    fc_batch_limit(w.domain, 1);
    write_shards(&w, 0);
    for (int n = 0; n < 2; n++) {
        open(&w, FC_PHASE_BACKWARD);
        for (size_t u = 0; u < N_UNITS; u++) {
            CHECK_OK(unshard(&w, u));
            CHECK_OK(reshard(&w, u));
        }
        close_phase(&w);
    }
    CHECK_EQ(n_begun, 0);
    leave_world(&w);
    can_begin = false;
}

int main(void)
{
    static bool kinds[] = {true, false};

    is_extended = true;
    for (size_t k = 0; k < 2; k++) {
        for (int n_ranks = 1; n_ranks <= 3; n_ranks++) {
            ranks_check(n_ranks, body_extended, &kinds[k]);
            ranks_check(n_ranks, body_extended_failing, &kinds[k]);
        }
    }
    for (int n_ranks = 2; n_ranks <= 3; n_ranks++) {
        ranks_check(n_ranks, body_extended_gathers, NULL);
        ranks_check(n_ranks, body_extended_large, NULL);
        for (size_t k = 0; k < 2; k++) {
            ranks_check(n_ranks, body_extended_kept, &kinds[k]);
        }
    }
    return check_result();
}
