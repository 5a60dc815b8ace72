/* Ranks that meet before collectives of messages: what is said where they are about to make other
 * ones, or none. */
#define _GNU_SOURCE

#include "apart_world.h"

#include "engine/domain_private.h"
#include "engine/waits.h"

#define TEXT_BYTES 1024
#define ADVICE                                                                                     \
    "over a process group all ranks call the same units in the same order, with the same "         \
    "set_requires_gradient_sync(), and each with gradients "                                       \
    "(set_reduce_scatter_unused_params(True) where they use different parameters)"

/* What a rank is about to do. */
typedef struct act {
    size_t unit;
    const char *op;
    uint64_t detail;
} act;

static fc_status come(world *w, act what)
{
    return fc_domain_meet(unit_of(w, what.unit), what.op, what.detail);
}

/* A phase in which all ranks meet `n` times. */
static void meet_alike(world *w, fc_phase phase, int n)
{
    begin(w, phase, 0, 0);
    for (int i = 0; i < n; i++) {
        CHECK_OK(come(w, (act){(size_t)i % N_UNITS, "all-gather", 0}));
    }
    end(w);
}

static void body_alike(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    for (int step = 0; step < 20; step++) {
        meet_alike(&w, FC_PHASE_FORWARD, step % 4);
        for (int b = 0; b < step % 3; b++) {
            meet_alike(&w, FC_PHASE_BACKWARD, 7);
        }
    }
    /* Who left meets nobody. */
    fc_domain_leave(w.domain);
    CHECK_OK(come(&w, (act){0, "all-gather", 0}));
    CHECK_EQ(w.n_gathers, 0);
    leave_world(&w);
}

/* Over shared memory there is nobody to meet. */
static void body_mapped(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    if (rank == 0) {
        CHECK_OK(come(&w, (act){0, "all-gather", 0}));
    }
    end(&w);
    leave_world(&w);
}

/* ---- waits ---- */

/* Until rank 0 has waited for the others, which come late: counted by what it is about to do. */
static void wait_for_others(world *w, act what, fc_wait_kind kind)
{
    const uint64_t n = fc_waits_of(w->domain, unit_of(w, what.unit), kind).n;
    int32_t has_waited[RANKS_MAX] = {0};

    for (int i = 0; i < 1000 && has_waited[0] == 0; i++) {
        int32_t own;

        if (w->rank > 0) {
            (void)usleep(2000);
        }
        CHECK_OK(come(w, what));
        own = fc_waits_of(w->domain, unit_of(w, what.unit), kind).n > n;
        CHECK_OK(ranks_exchange(&w->own_host, "waited", &own, sizeof(own), has_waited));
    }
    CHECK(has_waited[0] != 0);
}

static void body_waits(int rank, int n_ranks, void *arg)
{
    uint64_t n = 0, ns = 0, ns_by_peer = 0, n_before, ns_before, n_all, ns_all;
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    fc_transport_wait_stats(w.watch, &n_before, &ns_before);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_OK(come(&w, (act){1, "all-gather", 0}));
    wait_for_others(&w, (act){0, "all-gather", 0}, FC_WAIT_FORWARD);
    CHECK_EQ(fc_waits_of(w.domain, unit_of(&w, 0), FC_WAIT_BACKWARD).n, 0);
    CHECK_EQ(fc_waits_of(w.domain, unit_of(&w, 0), FC_WAIT_REDUCE).n, 0);
    end(&w);
    begin(&w, FC_PHASE_BACKWARD, 0, 0);
    CHECK_OK(come(&w, (act){1, "all-gather", 0}));
    wait_for_others(&w, (act){2, "all-gather", 0}, FC_WAIT_BACKWARD);
    CHECK_EQ(fc_waits_of(w.domain, unit_of(&w, 2), FC_WAIT_FORWARD).n, 0);
    CHECK_EQ(fc_waits_of(w.domain, unit_of(&w, 2), FC_WAIT_REDUCE).n, 0);
    wait_for_others(&w, (act){2, "reduce-scatter", 0}, FC_WAIT_REDUCE);
    wait_for_others(&w, (act){2, "all-reduce", 0}, FC_WAIT_REDUCE);
    CHECK_EQ(fc_waits_of(w.domain, unit_of(&w, 0), FC_WAIT_REDUCE).n, 0);
    end(&w);
    /* Each is for somebody. */
    for (fc_wait_kind kind = FC_WAIT_FORWARD; kind < FC_WAIT_KIND_COUNT; kind++) {
        for (size_t u = 0; u <= N_UNITS; u++) {
            const fc_unit *unit = u < N_UNITS ? unit_of(&w, u) : NULL;
            const fc_waits waits = fc_waits_of(w.domain, unit, kind);

            n += waits.n;
            ns += waits.ns;
            CHECK((waits.n == 0) == (waits.longest_peer == -1));
            CHECK(waits.longest_peer != rank && waits.longest_peer < n_ranks);
            CHECK(waits.longest_ns <= waits.ns);
            CHECK(waits.n == 0 || waits.longest_ns <= fc_waits_for(w.domain, waits.longest_peer));
        }
    }
    for (int r = 0; r < n_ranks; r++) {
        ns_by_peer += fc_waits_for(w.domain, r);
    }
    CHECK_EQ(ns_by_peer, ns);
    CHECK_EQ(fc_waits_for(w.domain, rank), 0);
    fc_transport_wait_stats(w.watch, &n_all, &ns_all);
    CHECK_EQ(n, n_all - n_before);
    CHECK_EQ(ns, ns_all - ns_before);
    fc_waits_reset(w.domain);
    for (int r = 0; r < n_ranks; r++) {
        CHECK_EQ(fc_waits_for(w.domain, r), 0);
    }
    leave_world(&w);
}

/* Who waits for a rank that dies is told so, and waits for nobody after that. */
static void body_death(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_OK(come(&w, (act){0, "all-gather", 0}));
    if (rank == 1) {
        (void)kill(getpid(), SIGKILL);
    }
    CHECK_EQ(come(&w, (act){1, "reduce-scatter", 0}), FC_ERR_PEER);
    CHECK_HAS(fc_last_message(), "rank 11 (pid ");
    CHECK_HAS(fc_last_message(), "in reduce-scatter of unit layers.0 (step 1)");
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_EQ(come(&w, (act){0, "all-gather", 0}), FC_ERR_BROKEN);
    leave_world(&w);
}

static void test_death(int n_ranks)
{
    int statuses[RANKS_MAX];

    ranks_run(n_ranks, body_death, NULL, statuses);
    CHECK_EQ(statuses[1], SIGKILL);
    for (int r = 0; r < n_ranks; r += 2) {
        CHECK_EQ(statuses[r], 0);
    }
}

/* ---- another collective ---- */

typedef struct other {
    act common, rank_1; /* of rank 1 */
    const char *text;   /* of both, where ranks 0 and 1 are named */
    const char *text_of_2;
    bool is_packed;
} other;

static const other others[] = {
    {{0, "all-gather", 0},
     {1, "all-gather", 0},
     "rank 10 is in the all-gather of unit embed and rank 11 in the all-gather of unit layers.0 "
     "(step 2): " ADVICE,
     "rank 11 is in the all-gather of unit layers.0 and rank 12 in the all-gather of unit embed "
     "(step 2): " ADVICE,
     false},
    {{2, "reduce-scatter", 7},
     {2, "all-reduce", 7},
     "rank 10 is in the reduce-scatter of unit head and rank 11 in the all-reduce of unit head "
     "(step 2): " ADVICE,
     "rank 11 is in the all-reduce of unit head and rank 12 in the reduce-scatter of unit head "
     "(step 2): " ADVICE,
     false},
    {{1, "reduce-scatter", 7},
     {1, "reduce-scatter", 6},
     "ranks 10 and 11 are in the reduce-scatter of unit layers.0 with gradients of different "
     "parameters (step 2): on a device all ranks have gradients of the same ones; call "
     "set_reduce_scatter_unused_params(True), or give each loss a part of all",
     "ranks 11 and 12 are in the reduce-scatter of unit layers.0 with gradients of different "
     "parameters (step 2): on a device all ranks have gradients of the same ones; call "
     "set_reduce_scatter_unused_params(True), or give each loss a part of all",
     false},
    {{1, "all-reduce", UINT64_C(0x80000000)},
     {1, "all-reduce", 0},
     "ranks 10 and 11 are in the all-reduce of unit layers.0 with gradients of different "
     "parameters (step 2): over a process group all ranks have gradients of the same ones; call "
     "set_reduce_scatter_unused_params(True), or give each loss a part of all",
     "ranks 11 and 12 are in the all-reduce of unit layers.0 with gradients of different "
     "parameters (step 2): over a process group all ranks have gradients of the same ones; call "
     "set_reduce_scatter_unused_params(True), or give each loss a part of all",
     true},
};

/* The same sentence on both ranks, which both name the lower one first; nothing travels. Then, as
 * all have heard of it, all go on. */
static void body_other(int rank, int n_ranks, void *arg)
{
    const other *o = arg;
    world w;

    join(&w, WATCHED, rank, n_ranks, o->is_packed);
    meet_alike(&w, FC_PHASE_FORWARD, 1);
    for (int before = 0; before < 2; before++) {
        begin(&w, before == 0 ? FC_PHASE_FORWARD : FC_PHASE_BACKWARD, 0, 0);
        for (int i = 0; i < before; i++) {
            CHECK_OK(come(&w, (act){0, "all-gather", 0}));
        }
        CHECK_FAILS(come(&w, rank == 1 ? o->rank_1 : o->common), FC_ERR_MISMATCH,
                    rank == 2 ? o->text_of_2 : o->text);
        CHECK(!fc_domain_is_open(w.domain));
        CHECK_EQ(w.n_failed, 0); /* ranks that are late would count otherwise */
        together(&w);
    }
    meet_alike(&w, FC_PHASE_FORWARD, 3);
    leave_world(&w);
}

/* One comes with more units in its gather. */
static void body_more(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_OK(gather(w.domain, 0, 3));
    CHECK_FAILS(
        gather(w.domain, 1, rank == 1 ? 1 : 2), FC_ERR_MISMATCH,
        rank == 2
            ? "rank 11 is in the all-gather of unit layers.0 and rank 12 in the all-gather of unit "
              "layers.0 and 1 more (step 1): " ADVICE
            : "rank 10 is in the all-gather of unit layers.0 and 1 more and rank 11 in the "
              "all-gather of unit layers.0 (step 1): " ADVICE);
    CHECK_EQ(w.n_gathers, 1);
    together(&w);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_FAILS(
        gather(w.domain, 0, rank == 1 ? 3 : 2), FC_ERR_MISMATCH,
        rank == 2
            ? "rank 11 is in the all-gather of unit embed and 2 more and rank 12 in the all-gather "
              "of unit embed and 1 more (step 2): " ADVICE
            : "rank 10 is in the all-gather of unit embed and 1 more and rank 11 in the all-gather "
              "of unit embed and 2 more (step 2): " ADVICE);
    together(&w);
    leave_world(&w);
}

static fc_status begin_one(fc_unit *unit, size_t i)
{
    static float part[4096];
    const fc_present present = {.layout = fc_unit_layout(unit)};
    bool is_lent;

    switch (i) {
    case 0:
        return fc_waits_reduce_scatter(unit, part, part + 2048, &present);
    case 1:
        return fc_waits_all_reduce(unit, part, &present);
    case 2:
        return waits_sum_begin(unit, part, 4, FC_F32, &is_lent);
    default:
        return waits_gather_begin(unit, part, 4);
    }
}

/* Collectives of one unit are told as such. */
static void body_one_unit(int rank, int n_ranks, void *arg)
{
    static const char *const ops[] = {"reduce-scatter", "all-reduce", "reduce-scatter",
                                      "all-gather"};
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    for (size_t i = 0; i < 4; i++) {
        fc_unit *unit = unit_of(&w, rank == 1 ? 2 : 0);
        char text[TEXT_BYTES];

        begin(&w, FC_PHASE_FORWARD, 0, 0);
        (void)snprintf(
            text, sizeof(text),
            "rank 10 is in the %s of unit embed and rank 11 in the %s of unit head (step "
            "%zu): " ADVICE,
            ops[i], ops[i], i + 1);
        CHECK_FAILS(begin_one(unit, i), FC_ERR_MISMATCH, text);
        together(&w);
    }
    CHECK_EQ(w.n_reductions + w.n_sums, 0);
    leave_world(&w);
}

/* Long names are cut. */
static void body_long(int rank, int n_ranks, void *arg)
{
    static char name[200], text[TEXT_BYTES];
    world w;

    (void)arg;
    memset(name, 'x', sizeof(name) - 1);
    last_name = name;
    join(&w, WATCHED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    (void)snprintf(text, sizeof(text),
                   "rank 10 is in the all-gather of unit %.136s and rank 11 in the all-gather of "
                   "unit layers.0 and 1 more (step 1): " ADVICE,
                   name);
    CHECK_FAILS(gather(w.domain, rank == 1 ? 1 : 2, rank == 1 ? 2 : 1), FC_ERR_MISMATCH, text);
    together(&w);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    (void)snprintf(text, sizeof(text),
                   "rank 10 is in the all-gather of unit embed and rank 11 in the all-reduce of "
                   "unit %.136s (step 2): " ADVICE,
                   name);
    CHECK_FAILS(come(&w, rank == 1 ? (act){2, "all-reduce", 0} : (act){0, "all-gather", 0}),
                FC_ERR_MISMATCH, text);
    together(&w);
    leave_world(&w);
}

/* Who is ahead waits for the others, and is told nothing of what they know already. */
static void body_again(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    for (int ahead = 0; ahead < n_ranks; ahead++) {
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        CHECK_EQ(come(&w, (act){rank == 1, "all-gather", 0}), FC_ERR_MISMATCH);
        together(&w);
        if (rank == ahead) {
            atomic_store(&ranks_common->values[ahead], 1);
        } else {
            CHECK(ranks_await(ahead, 1));
            (void)usleep(20000); /* most often it waits by then */
        }
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        CHECK_OK(come(&w, (act){0, "all-gather", 0}));
        end(&w);
    }
    leave_world(&w);
}

/* ---- none at all ---- */

/* Who has failed the phase and is two further by now, without collectives, has left it by an
 * exception all the same: nobody is accused, and all go on from there. */
static void body_failed_long_ago(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    meet_alike(&w, FC_PHASE_FORWARD, 1);
    begin(&w, FC_PHASE_BACKWARD, 0, 0);
    CHECK_OK(come(&w, (act){0, "all-gather", 0}));
    together(&w);
    if (rank == 1) {
        fc_domain_fail(w.domain);
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        end(&w);
        begin(&w, FC_PHASE_BACKWARD, 0, 0);
        together(&w);
    } else {
        together(&w);
        (void)snprintf(text, sizeof(text),
                       "rank 11 left the backward of step 1 by an exception while rank %d was in "
                       "all-reduce of unit head; the gradients of this step are not complete",
                       10 + rank);
        CHECK_FAILS(come(&w, (act){2, "all-reduce", 0}), FC_ERR_PEER, text);
        fc_domain_fail(w.domain);
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        end(&w);
        begin(&w, FC_PHASE_BACKWARD, 0, 0);
    }
    CHECK_OK(come(&w, (act){2, "all-reduce", 0}));
    end(&w);
    leave_world(&w);
}

/* Rank 1 ends the phase without the collective, and opens the next one. */
static void body_gone(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    for (int n_before = 0; n_before < 2; n_before++) {
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        for (int i = 0; i < n_before; i++) {
            CHECK_OK(come(&w, (act){0, "all-gather", 0}));
        }
        if (rank == 1) {
            together(&w); /* they have begun */
            end(&w);
            begin(&w, FC_PHASE_BACKWARD, 0, 0);
        } else {
            together(&w);
            (void)snprintf(
                text, sizeof(text),
                "rank 11 has gone on without the all-reduce of unit head, which rank %d is in "
                "(step %d): " ADVICE,
                10 + rank, n_before + 1);
            CHECK_FAILS(come(&w, (act){2, "all-reduce", 0}), FC_ERR_MISMATCH, text);
            CHECK(!fc_domain_is_open(w.domain));
        }
        together(&w);
        if (rank == 1) {
            (void)snprintf(text, sizeof(text),
                           "rank 11 has gone on without the all-reduce of unit head, which rank 10 "
                           "is in (step %d): " ADVICE,
                           n_before + 1);
            CHECK_FAILS(come(&w, (act){0, "all-gather", 0}), FC_ERR_MISMATCH, text);
            fc_domain_fail(w.domain);
        }
        together(&w);
    }
    meet_alike(&w, FC_PHASE_FORWARD, 2);
    leave_world(&w);
}

/* Rank 1 leaves the phase by an exception; the others are told so, whatever they are in. */
static void body_failed(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    for (int step = 1; step <= 4; step++) {
        const bool is_backward = step % 2 == 0, is_met = step > 2;

        begin(&w, FC_PHASE_FORWARD, 0, 0);
        if (is_backward) {
            CHECK_OK(come(&w, (act){0, "all-gather", 0}));
            end(&w);
            begin(&w, FC_PHASE_BACKWARD, 0, 0);
        }
        if (is_met) {
            CHECK_OK(come(&w, (act){1, "all-gather", 0}));
        }
        together(&w);
        if (rank == 1) {
            fc_domain_fail(w.domain);
        } else {
            (void)snprintf(text, sizeof(text),
                           "rank 11 left the %s of step %d by an exception while rank %d was in "
                           "reduce-scatter of unit embed; the gradients of this step are not "
                           "complete",
                           is_backward ? "backward" : "forward", step, 10 + rank);
            CHECK_FAILS(come(&w, (act){0, "reduce-scatter", 0}), FC_ERR_PEER, text);
            fc_domain_fail(w.domain);
        }
        CHECK_EQ(w.n_failed, 0); /* rank 1 has not been as far as the others */
        together(&w);
    }
    meet_alike(&w, FC_PHASE_FORWARD, 2);
    leave_world(&w);
}

/* Rank 1 leaves a forward by an exception, of which the others hear in the backward. If they have
 * left it, too, they wait for it there. */
static void body_left_forward(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    for (int step = 1; step <= 3; step++) {
        const bool is_alike = step == 2;

        begin(&w, FC_PHASE_FORWARD, 0, 0);
        CHECK_OK(come(&w, (act){0, "all-gather", 0}));
        if (rank == 1 || is_alike) {
            fc_domain_fail(w.domain);
        } else {
            end(&w);
        }
        together(&w);
        if (is_alike) {
            meet_alike(&w, FC_PHASE_BACKWARD, 2);
        } else if (rank != 1) {
            begin(&w, FC_PHASE_BACKWARD, 0, 0);
            (void)snprintf(text, sizeof(text),
                           "rank 11 left the forward of step %d by an exception while rank %d was "
                           "in all-gather of unit embed; the gradients of this step are not "
                           "complete",
                           step, 10 + rank);
            CHECK_FAILS(come(&w, (act){0, "all-gather", 0}), FC_ERR_PEER, text);
            fc_domain_fail(w.domain);
        }
        together(&w);
    }
    meet_alike(&w, FC_PHASE_FORWARD, 2);
    leave_world(&w);
}

/* ---- who was not there ---- */

/* Ranks 0 and 1 differ. Rank 2 comes to no collective of that phase, and is told in its next one
 * what it was; unless it has left the phase by an exception itself. It may have left another one
 * so meanwhile. */
static void body_third(int rank, int n_ranks, void *arg)
{
    enum {
        IN_BACKWARD,
        NOT_AT_ALL,
        IN_FORWARD,
        N_WAYS
    };
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    for (int way = 0; way < N_WAYS; way++) {
        begin(&w, FC_PHASE_FORWARD, (uint32_t)(rank == 1), 0);
        together(&w);
        if (rank < 2) {
            CHECK_EQ(come(&w, (act){0, "all-gather", 0}), FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), "begins in the forward of Model on rank 10");
        } else if (way == NOT_AT_ALL) {
            fc_domain_fail(w.domain);
        } else {
            end(&w);
            begin(&w, FC_PHASE_BACKWARD, 0, 0);
        }
        together(&w);
        if (rank == 2 && way != NOT_AT_ALL) {
            if (way == IN_FORWARD) {
                fc_domain_fail(w.domain);
                begin(&w, FC_PHASE_FORWARD, 0, 0);
            }
            CHECK_EQ(come(&w, (act){0, "all-gather", 0}), FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), "begins in the forward of Model on rank 10");
            if (way == IN_BACKWARD) {
                fc_domain_fail(w.domain);
            }
        }
        if (rank == 2) {
            atomic_store(&ranks_common->values[way], 1);
        } else {
            CHECK(ranks_await(way, 1));
            (void)usleep(20000); /* rank 2 is the first in the next forward, most often */
        }
        if (rank < 2 || way != IN_FORWARD) {
            begin(&w, FC_PHASE_FORWARD, 0, 0);
        }
        CHECK_OK(come(&w, (act){0, "all-gather", 0}));
        end(&w);
    }
    leave_world(&w);
}

/* Ranks 0 and 1 are one domain of a root, ranks 0 and 2 the other. Rank 2 says that rank 0 has
 * passed a backward over, who hears of it though it comes to the first domain alone; once. */
static void body_elsewhere(int rank, int n_ranks, void *arg)
{
    fc_status st = FC_OK;
    world w = {.kind = WATCHED, .n_ranks = 2, .rank = rank > 0};

    (void)arg;
    (void)alarm(DOMAINS_WATCHDOG_S);
    of_messages = &w;
    w.own_host = (ranks_host){.board = &ranks_common->boards[3], .rank = rank, .n_ranks = n_ranks};
    make_domain(&w, rank == 2 ? 1 : 0, &w.transport, &w.watch, &w.domain);
    if (rank == 0) {
        make_domain(&w, 1, &w.second_transport, &w.second_watch, &w.second);
        fc_domain_link((fc_domain *const[]){w.domain, w.second}, 2);
    }
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    together(&w);
    end(&w);
    begin(&w, rank == 2 ? FC_PHASE_BACKWARD : FC_PHASE_FORWARD, 0, 0);
    together(&w);
    if (rank == 2) {
        CHECK_EQ(come(&w, (act){0, "all-gather", 0}), FC_ERR_MISMATCH);
    }
    together(&w);
    if (rank == 0) {
        st = come(&w, (act){1, "all-gather", 0});
        CHECK_EQ(st, FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "without the backward of step 1 that rank 11 is in");
    }
    if (rank < 2) {
        CHECK_OK(come(&w, (act){1, "all-gather", 0}));
        CHECK_OK(come(&w, (act){2, "all-gather", 0}));
    }
    together(&w);
    leave_world(&w);
}

/* ---- an accusation that is over ---- */

enum {
    WAITS,
    ACCUSED,
    SEEN,
    OVER
};

static void note_wait(void *context)
{
    (void)context;
    if (of_messages->second != NULL && fc_domain_is_open(of_messages->second)) {
        atomic_store(&ranks_common->values[WAITS], 1);
    }
}

/* Rank 0 has found that it is accused, and before it looks whose words these are the accuser goes
 * on. */
static void let_accuser_go_on(void *context)
{
    const fc_domain *second = of_messages->second;

    (void)context;
    if (second != NULL && fc_word_load(&domain_clock(second, 1)->accused) != 0) {
        CHECK(ranks_await(ACCUSED, 1));
        atomic_store(&ranks_common->values[SEEN], 1);
        CHECK(ranks_await(OVER, 1));
    }
}

/* As above, but rank 1 is late, and rank 2 in its next phase when rank 0 would be told: rank 0 goes
 * on to wait for rank 1, and accuses nobody. */
static void body_accusation_over(int rank, int n_ranks, void *arg)
{
    world w = {.kind = WATCHED, .n_ranks = 2, .rank = rank > 0};

    (void)arg;
    (void)alarm(DOMAINS_WATCHDOG_S);
    of_messages = &w;
    at_wait = note_wait;
    at_end_of_wait = let_accuser_go_on;
    w.own_host = (ranks_host){.board = &ranks_common->boards[3], .rank = rank, .n_ranks = n_ranks};
    make_domain(&w, rank == 2 ? 1 : 0, &w.transport, &w.watch, &w.domain);
    if (rank == 0) {
        make_domain(&w, 1, &w.second_transport, &w.second_watch, &w.second);
        fc_domain_link((fc_domain *const[]){w.domain, w.second}, 2);
    }
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    together(&w);
    end(&w);
    begin(&w, rank == 2 ? FC_PHASE_BACKWARD : FC_PHASE_FORWARD, 0, 0);
    together(&w);
    if (rank == 2) {
        CHECK(ranks_await(WAITS, 1));
        CHECK_EQ(come(&w, (act){0, "all-gather", 0}), FC_ERR_MISMATCH);
        atomic_store(&ranks_common->values[ACCUSED], 1);
        CHECK(ranks_await(SEEN, 1));
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        atomic_store(&ranks_common->values[OVER], 1);
    } else {
        CHECK(rank == 0 || ranks_await(OVER, 1));
        CHECK_OK(come(&w, (act){1, "all-gather", 0}));
    }
    together(&w);
    leave_world(&w);
}

typedef struct damage {
    uint64_t what;
    const char *last_name, *text;
} damage;

#define X68 "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"

static const damage damages[] = {
    {UINT64_MAX, "head", "and rank 11 in the ? of unit ? and 1022 more (step 1)"},
    {UINT64_C(3) << 44 | UINT64_C(1) << 34, "head",
     "and rank 11 in the all-gather of unit ? (step 1)"},
    {UINT64_C(2) << 44 | UINT64_C(3) << 34, X68 X68 X68,
     "and rank 11 in the all-gather of unit " X68 X68 " (step 1)"},
};

/* Of a peer's word everything may be wrong, as after flipped bits. */
static void body_damaged(int rank, int n_ranks, void *arg)
{
    const damage *of = arg;
    world w;

    last_name = of->last_name;
    join(&w, WATCHED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_OK(come(&w, (act){0, "all-gather", 0}));
    together(&w);
    if (rank == 1) {
        clock_line *own = domain_clock(w.domain, rank);

        for (int slot = 0; slot < 2; slot++) {
            __atomic_store_n(&own->what[slot].value, of->what, __ATOMIC_RELEASE);
        }
        __atomic_fetch_add(&own->met.value, 1, __ATOMIC_RELEASE);
    } else {
        CHECK_EQ(come(&w, (act){1, "all-gather", 0}), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), of->text);
    }
    together(&w);
    leave_world(&w);
}

int main(void)
{
    for (int n = 1; n <= 3; n++) {
        ranks_check(n, body_alike, NULL);
    }
    for (int n = 2; n <= 3; n++) {
        ranks_check(n, body_mapped, NULL);
        ranks_check(n, body_waits, NULL);
        test_death(n);
        for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
            other o = others[i];

            ranks_check(n, body_other, &o);
        }
        ranks_check(n, body_more, NULL);
        ranks_check(n, body_again, NULL);
        ranks_check(n, body_gone, NULL);
        ranks_check(n, body_failed, NULL);
        ranks_check(n, body_failed_long_ago, NULL);
        ranks_check(n, body_left_forward, NULL);
    }
    for (size_t i = 0; i < sizeof(damages) / sizeof(damages[0]); i++) {
        damage of = damages[i];

        ranks_check(2, body_damaged, &of);
    }
    ranks_check(2, body_one_unit, NULL);
    ranks_check(2, body_long, NULL);
    ranks_check(3, body_third, NULL);
    ranks_check(3, body_elsewhere, NULL);
    ranks_check(3, body_accusation_over, NULL);
    return check_result();
}
