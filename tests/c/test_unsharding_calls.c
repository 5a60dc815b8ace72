/* What a unit asks of its owner at each transition, and what memory it holds. `arg`: whether in
 * shared memory.
 */
#define _GNU_SOURCE

#include "unsharding_world.h"

#include "window/window.h"

/* Bytes of slots that somebody uses. */
static size_t used_bytes(const world *w)
{
    fc_slots_trim(w->slots);
    return fc_slots_bytes(w->slots);
}

/* How often the owner was shown, hidden or withheld since then. */
typedef struct calls {
    int shown, hidden, withheld;
} calls;

static calls calls_of(const owner *o)
{
    return (calls){o->n_shown, o->n_hidden, o->n_withheld};
}

static void check_calls(const owner *o, calls before, int shown, int hidden, int withheld)
{
    CHECK_EQ(o->n_shown - before.shown, shown);
    CHECK_EQ(o->n_hidden - before.hidden, hidden);
    CHECK_EQ(o->n_withheld - before.withheld, withheld);
}

/* ---- bytes ---- */

static void body_traffic(int rank, int n_ranks, void *arg)
{
    world w;
    uint64_t from_peers = 0, own_narrow, whole;
    const fc_layout *l;
    const fc_traffic *t;

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    t = &w.owners[0].traffic;
    l = w.owners[0].layout;
    for (size_t i = 0; i < N_PARAMS; i++) {
        from_peers += (ROWS - l->params[i].own_rows) * COLUMNS * fc_dtype_bytes(computed[i]);
    }
    own_narrow = l->params[1].own_rows * COLUMNS * fc_dtype_bytes(FC_BF16);
    whole = l->full_bytes;
    CHECK_EQ(fc_unsharding_moves(w.owners[0].unsharding), n_ranks > 1);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_EQ(t->copied, w.is_mapped ? own_narrow : 0);
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(t->unshards, 1);
    CHECK_EQ(t->gathers, n_ranks > 1);
    CHECK_EQ(t->gathered, from_peers);
    CHECK_EQ(t->copied, w.is_mapped ? own_narrow : l->pack_bytes + whole);
    CHECK_OK(fc_unsharding_end_forward(w.owners[0].unsharding));
    CHECK_OK(fc_unsharding_keep(w.owners[0].unsharding));
    CHECK_EQ(t->copied, w.is_mapped ? own_narrow + whole : l->pack_bytes + whole);
    CHECK_OK(fc_unsharding_keep(w.owners[0].unsharding)); /* it is */
    CHECK_EQ(t->copied, w.is_mapped ? own_narrow + whole : l->pack_bytes + whole);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    CHECK_OK(unshard(&w, 0)); /* outside of a phase, a copy */
    CHECK_EQ(t->unshards, 2);
    CHECK_EQ(t->gathers, 2 * (n_ranks > 1));
    CHECK_EQ(t->gathered, 2 * from_peers);
    CHECK_EQ(t->copied, 2 * (w.is_mapped ? own_narrow + whole : l->pack_bytes + whole));
    CHECK_OK(reshard(&w, 0));
    leave_world(&w);
}

/* The least that peers may read elsewhere than in a shard. */
static void body_one_byte(int rank, int n_ranks, void *arg)
{
    world w;
    const owner *o = &w.owners[0];

    (void)arg;
    is_tiny = true;
    join(&w, rank, n_ranks, true);
    memset(o->shards[0], 7, 1);
    CHECK(fc_unsharding_publishes(o->unsharding));
    open(&w, FC_PHASE_FORWARD);
    CHECK_EQ(o->traffic.copied, 1);
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(*o->shown, 7);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
    is_tiny = false;
}

/* ---- memory ---- */

static void body_memory(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];
    calls before;
    size_t one, held;

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    one = o->layout->full_bytes;
    held = w.is_mapped ? 0 : one;
    write_shards(&w, 0);

    /* Asked for and dropped. */
    CHECK_OK(fc_unsharding_gather(o->unsharding));
    CHECK_EQ(used_bytes(&w), one);
    fc_unsharding_keep_memory(o->unsharding, false); /* somebody may still use it */
    CHECK_EQ(used_bytes(&w), one);
    fc_unsharding_drop(o->unsharding);
    CHECK_EQ(used_bytes(&w), 0);

    /* Shown, it is nobody's to take; a copy that was made before the phase is none any more. */
    CHECK_OK(fc_unsharding_gather(o->unsharding));
    CHECK_OK(barrier(&w.host)); /* peers have read the shards */
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(used_bytes(&w), held);
    fc_unsharding_keep_memory(o->unsharding, true);
    CHECK_EQ(used_bytes(&w), held);
    fc_unsharding_drop(o->unsharding); /* it is used */
    CHECK_STATE(&w, 0, UNSHARDED);
    fc_unsharding_keep_memory(o->unsharding, false);
    CHECK_EQ(used_bytes(&w), held);
    check_values(&w, 0, 0);
    CHECK_OK(reshard(&w, 0));
    CHECK_EQ(used_bytes(&w), 0);

    /* Kept until that ends: over reshards, and over drops. */
    fc_unsharding_keep_memory(o->unsharding, true);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    CHECK_OK(reshard(&w, 0));
    CHECK_EQ(used_bytes(&w), one);
    CHECK(fc_unsharding_gather(o->unsharding) == FC_OK);
    fc_unsharding_drop(o->unsharding);
    CHECK_EQ(used_bytes(&w), one);
    before = calls_of(o);
    fc_unsharding_keep_memory(o->unsharding, false);
    check_calls(o, before, 0, 1, 0);
    CHECK_EQ(used_bytes(&w), 0);
    fc_unsharding_keep_memory(o->unsharding, false);
    check_calls(o, before, 0, 1, 0);
    close_phase(&w);
    leave_world(&w);
}

/* Memory that is kept is filled anew by each gather, whenever that was asked for. */
static void body_kept_memory(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    fc_unsharding_keep_memory(o->unsharding, true);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    CHECK(fc_unsharding_has_own_memory(o->unsharding) == w.is_mapped);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    write_shards(&w, 1);
    CHECK_OK(fc_unsharding_gather(o->unsharding));
    CHECK_OK(barrier(&w.host)); /* peers have read the shards */
    write_shards(&w, 2);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 2);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    CHECK_OK(unshard(&w, 0)); /* or shown since before */
    check_values(&w, 0, 2);
    CHECK_STATE(&w, 0, KEPT);
    CHECK_OK(barrier(&w.host));
    write_shards(&w, 1);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 1);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* An object that ends gives back what it has, and nobody finds it any more. */
static void body_destroy(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    o->keeps_size = true;
    fc_unsharding_destroy(o->unsharding);
    CHECK(o->shown == NULL && !o->keeps_size);
    CHECK_EQ(used_bytes(&w), 0);
    create(&w, 0);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    CHECK_OK(reshard(&w, 0));

    if (!w.is_mapped && n_ranks > 1) { /* it came along, and is to in the next one */
        open(&w, FC_PHASE_FORWARD);
        close_phase(&w);
        for (int n = 0; n < 2; n++) {
            open(&w, FC_PHASE_BACKWARD);
            for (size_t u = 0; u < N_UNITS; u++) {
                CHECK_OK(unshard(&w, u));
                CHECK_OK(reshard(&w, u));
            }
            close_phase(&w);
        }
        fc_unsharding_destroy(w.owners[1].unsharding);
        w.owners[1].unsharding = NULL;
        open(&w, FC_PHASE_BACKWARD);
        CHECK_OK(unshard(&w, 0));
        CHECK_STATE(&w, 2, AHEAD);
        CHECK_EQ(fc_order_n_ahead(w.domain), 1);
        fc_unsharding_destroy(w.owners[2].unsharding);
        w.owners[2].unsharding = NULL;
        CHECK_EQ(fc_order_n_ahead(w.domain), 0);
        CHECK_EQ(used_bytes(&w), o->layout->full_bytes);
        CHECK_OK(reshard(&w, 0));
        CHECK_OK(fc_domain_close(w.domain));
        create(&w, 2);
        create(&w, 1);
    }
    leave_world(&w);
}

static void body_no_memory(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];
    int64_t live;

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    fc_unsharding_destroy(o->unsharding);
    live = fc_alloc_live();
    for (int n = 0; n < 3; n++) {
        const fc_unsharding_options options = {.unit = fc_domain_unit(w.domain, 0),
                                               .slots = w.slots,
                                               .traffic = &o->traffic,
                                               .ops = &ops,
                                               .owner = o};

        fc_alloc_fail_after(n);
        CHECK_EQ(fc_unsharding_create(&options, &o->unsharding), FC_ERR_NOMEM);
        fc_alloc_fail_after(-1);
        CHECK_HAS(fc_last_message(), "unit 'first'");
        CHECK_EQ(fc_alloc_live(), live);
    }
    create(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    if (w.is_mapped) {
        fc_alloc_fail_after(0);
        CHECK_EQ(fc_unsharding_keep(o->unsharding), FC_ERR_NOMEM);
        fc_alloc_fail_after(-1);
        CHECK_STATE(&w, 0, UNSHARDED);
        check_values(&w, 0, 0);
        fc_unsharding_keep_memory(w.owners[1].unsharding, true);
        fc_alloc_fail_after(0);
        CHECK_EQ(unshard(&w, 1), FC_ERR_NOMEM);
        fc_alloc_fail_after(-1);
        CHECK_STATE(&w, 1, REQUESTED);
    }
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    CHECK_STATE(&w, 0, KEPT);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* ---- what the owner is asked ---- */

static void body_owner(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];
    fc_unsharding *u;
    calls before;

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    u = o->unsharding;
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    before = calls_of(o);
    fc_window()->use.unit = 0;
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(fc_window()->use.unit, fc_window_name("first"));
    CHECK_OK(unshard(&w, 0));
    check_calls(o, before, 1, 0, 0);
    fc_unsharding_set_graph(u, false); /* it is shown */
    check_calls(o, before, 1, 0, 0);
    fc_unsharding_withhold(u);
    check_calls(o, before, 1, 0, 0);
    o->keeps_size = true;
    CHECK_OK(reshard(&w, 0));
    check_calls(o, before, 1, 1, 0);
    CHECK(!o->keeps_size);
    CHECK_OK(reshard(&w, 0)); /* it is */
    check_calls(o, before, 1, 1, 0);
    fc_unsharding_set_graph(u, true);
    check_calls(o, before, 1, 1, 0);
    o->keeps_size = true;
    fc_unsharding_set_graph(u, false);
    check_calls(o, before, 1, 2, 0);
    CHECK(!o->keeps_size);
    close_phase(&w);

    open(&w, FC_PHASE_BACKWARD);
    before = calls_of(o);
    fc_unsharding_withhold(u);
    check_calls(o, before, 0, 0, 1);
    CHECK_OK(reshard(&w, 0));
    check_calls(o, before, 0, 1, 2);
    CHECK_OK(reshard(&w, 0));
    check_calls(o, before, 0, 1, 2);
    /* A graph may look for it. */
    CHECK_OK(unshard(&w, 0));
    fc_unsharding_set_graph(u, true);
    CHECK_OK(reshard(&w, 0));
    fc_unsharding_withhold(u);
    CHECK(o->is_withheld);
    o->keeps_size = false;
    CHECK_OK(reshard(&w, 0));
    CHECK(!o->is_withheld);
    CHECK_EQ(o->shown != NULL, w.is_mapped);
    CHECK_EQ(o->keeps_size, !w.is_mapped);
    fc_unsharding_set_graph(u, false);
    CHECK(o->shown == NULL);
    close_phase(&w);
    leave_world(&w);
}

/* Writes to whole parameters, of which the owner may not be sure, last until a reshard. */
static void body_written_whole(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    write_shards(&w, 0);
    for (size_t written = 0; written < 3; written++) { /* the first, the second, both */
        open(&w, FC_PHASE_FORWARD);
        CHECK_OK(unshard(&w, 0));
        check_values(&w, 0, 0);
        for (size_t i = 0; i < N_PARAMS; i++) {
            if (written == 2 || written == i) {
                memset((char *)(uintptr_t)o->shown + o->layout->params[i].full_at, 0x3f, 8);
                o->may_be_written[i] = true;
            }
        }
        CHECK_OK(reshard(&w, 0));
        CHECK_OK(unshard(&w, 0));
        check_values(&w, 0, 0);
        CHECK_OK(reshard(&w, 0));
        close_phase(&w);
    }

    /* Kept, it has the write, and the next use does not. */
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    memset((char *)(uintptr_t)o->shown + o->layout->params[0].full_at, 0x3f, 8);
    o->may_be_written[0] = true;
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    CHECK_EQ(o->shown[o->layout->params[0].full_at], 0x3f);
    CHECK_OK(reshard(&w, 0));
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);

    /* It follows its shards unless it was written for sure. */
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    close_phase(&w);
    CHECK_OK(barrier(&w.host));
    write_shards(&w, 1);
    o->may_be_written[1] = true;
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 1);
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    /* Of memory of its own nothing is taken back. */
    o->is_written[0] = true;
    CHECK_OK(reshard(&w, 0));
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 1);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* Shards that are read where they lie are watched between ranks alone, and in forwards. */
static void body_watched(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    computed[1] = FC_F32; /* all lie where peers read them */
    join(&w, rank, n_ranks, *(const bool *)arg);
    CHECK_EQ(fc_unsharding_publishes(o->unsharding), !w.is_mapped);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK(!fc_unsharding_was_written(o->unsharding));
    o->writes[0]++;
    CHECK_EQ(fc_unsharding_was_written(o->unsharding), w.is_mapped && n_ranks > 1);
    o->writes[0]--;
    close_phase(&w);

    open(&w, FC_PHASE_BACKWARD); /* reads it, and hooks may write then */
    CHECK_OK(unshard(&w, 0));
    CHECK_OK(reshard(&w, 0));
    o->writes[0]++;
    CHECK_OK(fc_unsharding_check_unwritten(o->unsharding));
    CHECK_EQ(o->n_told, 0);
    close_phase(&w);
    leave_world(&w);
    computed[1] = FC_BF16;
}

/* ---- outside of phases ---- */

static fc_window_phase seen_phase; /* by the last exchange of messages */

static fc_status look_and_gather(void *context, void *recv, const void *send, size_t bytes)
{
    seen_phase = (fc_window_phase)fc_window()->now.phase;
    return all_gather(context, recv, send, bytes);
}

/* An explicit unshard is a phase of its own. */
static void body_between(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    gathers_by = look_and_gather;
    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    write_shards(&w, 0);
    for (uint64_t n = 1; n <= 2; n++) {
        CHECK_OK(fc_unsharding_gather(o->unsharding));
        CHECK(!fc_domain_is_open(w.domain));
        CHECK_EQ(fc_window()->now.phase, FC_WINDOW_BETWEEN);
        CHECK_EQ(fc_window()->now.step, n);
        if (!w.is_mapped) {
            CHECK_EQ(seen_phase, FC_WINDOW_UNSHARD);
        }
        CHECK_OK(fc_unsharding_gather(o->unsharding)); /* it is there */
        CHECK_EQ(fc_window()->now.step, n);
        fc_unsharding_drop(o->unsharding);
    }
    leave_world(&w);
    gathers_by = all_gather;
}

/* Some ranks unshard where others begin a forward: all of them are told who did what. */
static void body_apart(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    fc_status st;

    has_clock = true;
    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    write_shards(&w, 0);
    if (rank == 0) {
        open(&w, FC_PHASE_FORWARD);
        st = unshard(&w, 0);
        CHECK_EQ(fc_unsharding_state_of(o->unsharding),
                 w.is_mapped ? FC_UNIT_REQUESTED : FC_UNIT_SHARDED);
        fc_domain_fail(w.domain);
    } else {
        st = fc_unsharding_gather(o->unsharding);
        CHECK_STATE(&w, 0, SHARDED);
        CHECK_EQ(fc_window()->now.phase, FC_WINDOW_UNSHARD);
    }
    CHECK(st == FC_ERR_PEER || st == FC_ERR_MISMATCH); /* it sees that, or is told */
    CHECK_HAS(fc_last_message(), "a forward with gradients on rank 10");
    CHECK_HAS(fc_last_message(), "unshard() on rank 1");
    CHECK(o->shown == NULL);
    CHECK(!fc_domain_is_open(w.domain));
    CHECK_EQ(used_bytes(&w), 0);
    leave_world(&w);
}

/* Over messages a rank that has no memory for a copy fails the phase, so that nobody waits. */
static void body_short_memory(int rank, int n_ranks, void *arg)
{
    world w;

    has_clock = true;
    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    if (rank == 0) {
        fc_alloc_fail_after(0);
        CHECK_EQ(fc_unsharding_gather(w.owners[0].unsharding), FC_ERR_NOMEM);
        fc_alloc_fail_after(-1);
        CHECK(ranks_await(0, 1)); /* still there */
    } else {
        CHECK_EQ(fc_unsharding_gather(w.owners[0].unsharding), FC_ERR_PEER);
        CHECK_STATE(&w, 0, SHARDED);
        atomic_store(&ranks_common->values[0], 1);
    }
    leave_world(&w);
}

/* In shared memory a peer that leaves the phase of a copy fails it. */
static void body_peer_fails_copy(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    if (rank == 0) {
        fc_domain_open(w.domain, (fc_opening){FC_PHASE_UNSHARD, 0, FC_UPDATES_UNKNOWN});
        CHECK_OK(fc_domain_ready(w.domain, fc_domain_unit(w.domain, 0)));
        fc_domain_fail(w.domain);
    } else {
        CHECK_EQ(fc_unsharding_gather(w.owners[0].unsharding), FC_ERR_PEER);
        CHECK_STATE(&w, 0, SHARDED);
        CHECK_EQ(used_bytes(&w), 0);
    }
    leave_world(&w);
}

/* In shared memory: what is shown since before a phase is used in it when all ranks are there. */
static void body_peer_fails(int rank, int n_ranks, void *arg)
{
    world w;
    bool is_shown;

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    CHECK_OK(unshard(&w, 0));
    CHECK_STATE(&w, 0, KEPT);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 2));
    CHECK_OK(barrier(&w.host));
    fc_domain_fail(w.domain); /* an exception, on all ranks */
    if (rank == 0) {
        fc_domain_leave(w.domain);
    } else {
        CHECK_EQ(fc_unsharding_gather(w.owners[1].unsharding), FC_ERR_PEER);
        CHECK_STATE(&w, 1, SHARDED);
        CHECK(!fc_domain_is_open(w.domain));
        CHECK_EQ(used_bytes(&w), w.owners[0].layout->full_bytes);
        open(&w, FC_PHASE_FORWARD);
        CHECK_EQ(fc_unsharding_keep(w.owners[2].unsharding), FC_ERR_PEER);
        CHECK_STATE(&w, 2, UNSHARDED);
        CHECK_EQ(used_bytes(&w), w.owners[0].layout->full_bytes);
        fc_domain_fail(w.domain);
        open(&w, FC_PHASE_FORWARD);
        CHECK_EQ(fc_unsharding_begin_use(w.owners[0].unsharding, &is_shown), FC_ERR_PEER);
        CHECK_STATE(&w, 0, KEPT);
        CHECK_EQ(unshard(&w, 1), FC_ERR_PEER);
        CHECK_STATE(&w, 1, REQUESTED);
        CHECK(w.owners[1].shown == NULL);
        fc_domain_fail(w.domain);
    }
    leave_world(&w);
}

int main(void)
{
    static bool kinds[] = {true, false};

    ranks_check(1, body_one_byte, NULL);
    for (size_t k = 0; k < 2; k++) {
        for (int n_ranks = 1; n_ranks <= 3; n_ranks++) {
            ranks_check(n_ranks, body_traffic, &kinds[k]);
            ranks_check(n_ranks, body_memory, &kinds[k]);
            ranks_check(n_ranks, body_owner, &kinds[k]);
            ranks_check(n_ranks, body_kept_memory, &kinds[k]);
            ranks_check(n_ranks, body_written_whole, &kinds[k]);
            ranks_check(n_ranks, body_watched, &kinds[k]);
        }
        ranks_check(2, body_destroy, &kinds[k]);
        ranks_check(1, body_no_memory, &kinds[k]);
        ranks_check(2, body_between, &kinds[k]);
        ranks_check(3, body_apart, &kinds[k]);
    }
    ranks_check(2, body_short_memory, &kinds[1]);
    ranks_check(2, body_peer_fails, &kinds[0]);
    ranks_check(2, body_peer_fails_copy, &kinds[0]);
    return check_result();
}
