/* Ranks that meet before collectives of messages: what is said where they are about to make other
 * ones, or none. */
#define _GNU_SOURCE

#include "apart_world.h"

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

static fc_status meet(world *w, act what)
{
    return fc_domain_meet(unit_of(w, what.unit), what.op, what.detail);
}

/* A phase in which all ranks meet `n` times. */
static void meet_alike(world *w, fc_phase phase, int n)
{
    begin(w, phase, 0, 0);
    for (int i = 0; i < n; i++) {
        CHECK_OK(meet(w, (act){(size_t)i % N_UNITS, "all-gather", 0}));
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
    CHECK_OK(meet(&w, (act){0, "all-gather", 0}));
    CHECK_EQ(w.n_gathers, 0);
    leave_world(&w);
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
            CHECK_OK(meet(&w, (act){0, "all-gather", 0}));
        }
        CHECK_FAILS(meet(&w, rank == 1 ? o->rank_1 : o->common), FC_ERR_MISMATCH,
                    rank == 2 ? o->text_of_2 : o->text);
        CHECK(!fc_domain_is_open(w.domain));
        CHECK_EQ(w.n_failed, before + 1);
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

/* Who is ahead waits for the others, and is told nothing of what they know already. */
static void body_again(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    for (int ahead = 0; ahead < n_ranks; ahead++) {
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        CHECK_EQ(meet(&w, (act){rank == 1, "all-gather", 0}), FC_ERR_MISMATCH);
        together(&w);
        if (rank == ahead) {
            atomic_store(&ranks_common->values[ahead], 1);
        } else {
            CHECK(ranks_await(ahead, 1));
            (void)usleep(20000); /* most often it waits by then */
        }
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        CHECK_OK(meet(&w, (act){0, "all-gather", 0}));
        end(&w);
    }
    leave_world(&w);
}

int main(void)
{
    for (int n = 1; n <= 3; n++) {
        ranks_check(n, body_alike, NULL);
    }
    for (int n = 2; n <= 3; n++) {
        for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
            other o = others[i];

            ranks_check(n, body_other, &o);
        }
        ranks_check(n, body_more, NULL);
        ranks_check(n, body_again, NULL);
    }
    return check_result();
}
