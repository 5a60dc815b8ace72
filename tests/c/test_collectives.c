/* Who does a device's collectives: process groups of one and more ranks, NCCL over the stand-in
 * library, and what the failure of one group of NCCL means to the others. */
#define _GNU_SOURCE

#include "ranks.h"

#include "base/alloc.h"
#include "transport/collectives.h"
#include "transport/nccl_private.h"

#include <limits.h>

#define MUST(call) CHECK_MSG((call) == FC_OK, "%s", fc_last_message())
#define TIMEOUT_NS (20 * FC_NS_PER_S)

static const fc_label layer = {"layers.0", "test", 0};

/* A process group that notes what it is asked for. */
typedef struct asked {
    int gathers, scatters, reduces, released;
    double factor;
    fc_status status;
} asked;

static fc_status note_gather(void *context, fc_stream *stream, fc_label label, void *buffer,
                             size_t part_bytes)
{
    (void)stream;
    CHECK(strcmp(label.unit, "layers.0") == 0 && buffer != NULL && part_bytes == 4);
    ((asked *)context)->gathers++;
    return ((asked *)context)->status;
}

static fc_status note_scatter(void *context, fc_stream *stream, fc_label label, void *to,
                              const void *from, size_t numel, fc_dtype dtype)
{
    (void)stream;
    (void)label;
    CHECK(to != NULL && from != NULL && numel == 1 && dtype == FC_F32);
    ((asked *)context)->scatters++;
    return FC_OK;
}

static fc_status note_reduce(void *context, fc_stream *stream, fc_label label, void *buffer,
                             size_t numel, fc_dtype dtype)
{
    (void)stream;
    (void)label;
    CHECK(buffer != NULL && numel == 1 && dtype == FC_F32);
    ((asked *)context)->reduces++;
    return FC_OK;
}

static void note_scale(void *context, double factor)
{
    ((asked *)context)->factor = factor;
}

static void note_release(void *context)
{
    ((asked *)context)->released++;
}

static fc_collectives_group own_group(asked *a, int n_ranks)
{
    return (fc_collectives_group){.context = a,
                                  .n_ranks = n_ranks,
                                  .all_gather = note_gather,
                                  .reduce_scatter = note_scatter,
                                  .all_reduce = note_reduce,
                                  .scale = note_scale,
                                  .release = note_release};
}

static fc_status give(void *context, fc_stream *stream, size_t bytes, void **out)
{
    (void)context;
    (void)stream;
    *out = fc_alloc(1, bytes);
    return *out == NULL ? FC_ERR_NOMEM : FC_OK;
}

static void take_back(void *context, void *memory)
{
    (void)context;
    fc_free(memory);
}

static fc_stream *native(fc_stream *stream)
{
    return stream;
}

static int n_streams;

static fc_status in_stream(void *context, fc_stream *stream, fc_status (*body)(void *arg),
                           void *arg)
{
    CHECK(context == NULL && stream == NULL);
    n_streams++;
    return body(arg);
}

static fc_collectives *make(void)
{
    const fc_collectives_host host = {NULL, give, take_back, native, in_stream};
    fc_collectives *all = NULL;

    CHECK_OR_EXIT(fc_collectives_create(&host, &all) == FC_OK);
    return all;
}

static fc_status gather(fc_collectives *all, const char *name, size_t part_bytes)
{
    static float memory[4];
    const fc_device_caller caller = fc_collectives_caller(all);

    return caller.all_gather(caller.context, fc_collectives_find(all, name), NULL, layer, memory,
                             part_bytes);
}

/* Every collective of a process group's own. */
static void call_all(fc_collectives *all, const char *name, bool has_each)
{
    float memory[4] = {0}, part = 0;
    const fc_gather each = {memory, memory, 4};
    const fc_device_caller call = fc_collectives_caller(all);
    fc_device_comm *comm = fc_collectives_find(all, name);

    CHECK_OR_EXIT(comm != NULL);
    CHECK(!fc_collectives_has_groups(comm));
    MUST(gather(all, name, 4));
    MUST(gather(all, name, 0));
    MUST(call.reduce_scatter(call.context, comm, NULL, layer, &part, memory, 1, FC_F32));
    MUST(call.all_reduce(call.context, comm, NULL, layer, memory, 1, FC_F32));
    CHECK_EQ(call.all_gather_each(call.context, comm, NULL, layer, &each, 1),
             has_each ? FC_OK : FC_ERR_UNSUPPORTED);
}

static bool never(void *arg)
{
    (void)arg;
    return false;
}

static void test_process_groups(void)
{
    asked alone = {0}, two = {0}, late = {0};
    const fc_collectives_group of_one = own_group(&alone, 1), of_two = own_group(&two, 2);
    const fc_collectives_group too_late = own_group(&late, 2);
    fc_collectives *all = make();
    const fc_device_caller call = fc_collectives_caller(all);
    void *memory = NULL;

    MUST(fc_collectives_connect(all, "one", &of_one));
    MUST(fc_collectives_connect(all, "two", &of_two));
    MUST(fc_collectives_connect(all, "two", &too_late)); /* the first stays */
    CHECK_EQ(late.released, 1);
    CHECK(fc_collectives_find(all, "three") == NULL);
    call_all(all, "one", true);
    CHECK(alone.gathers == 0 && alone.scatters == 1 && alone.reduces == 0);
    call_all(all, "two", false);
    CHECK_HAS(fc_last_message(), "all-gathers of unit layers.0: a process group has no groups");
    CHECK(two.gathers == 1 && two.scatters == 1 && two.reduces == 1);
    two.status = FC_ERR_SYSTEM;
    CHECK_EQ(gather(all, "two", 4), FC_ERR_SYSTEM);
    MUST(fc_collectives_watch(all));
    CHECK_EQ(call.wait(call.context, never, NULL), FC_AGAIN); /* nobody to watch */
    MUST(call.alloc(call.context, NULL, 8, &memory));
    call.free(call.context, memory);
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_collectives_connect(all, "three", &too_late), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_EQ(late.released, 2);
    fc_collectives_destroy(all);
    CHECK(alone.released == 1 && two.released == 1 && late.gathers == 0);
    fc_collectives_destroy(NULL);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* ---- in sight ---- */

static float seen_memory[4];

static fc_status see_gather(void *context, void *recv, const void *send, size_t send_bytes)
{
    CHECK(recv == seen_memory && send == &seen_memory[1] && send_bytes == sizeof(float));
    ((asked *)context)->gathers++;
    return ((asked *)context)->status;
}

static fc_status see_scatter(void *context, void *recv, void *send, size_t recv_numel,
                             fc_dtype dtype)
{
    CHECK(recv == &seen_memory[3] && send == seen_memory && recv_numel == 2 && dtype == FC_F32);
    ((asked *)context)->scatters++;
    return FC_OK;
}

static fc_status see_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    CHECK(data == seen_memory && numel == 4 && dtype == FC_BF16);
    ((asked *)context)->reduces++;
    return FC_OK;
}

/* Reductions are brought to who looks on, of one rank, too; each in its stream. */
static void check_in_sight(int n_ranks)
{
    asked a = {0};
    const fc_collectives_group group = {.n_ranks = n_ranks,
                                        .rank = 1,
                                        .is_seen = true,
                                        .seen = {.context = &a,
                                                 .all_gather = see_gather,
                                                 .reduce_scatter = see_scatter,
                                                 .all_reduce = see_reduce,
                                                 .release = note_release}};
    fc_collectives *all = make();
    const fc_device_caller call = fc_collectives_caller(all);
    fc_device_comm *comm;

    n_streams = 0;
    MUST(fc_collectives_connect(all, "seen", &group));
    comm = fc_collectives_find(all, "seen");
    MUST(call.all_gather(call.context, comm, NULL, layer, seen_memory, sizeof(float)));
    MUST(call.reduce_scatter(call.context, comm, NULL, layer, &seen_memory[3], seen_memory, 2,
                             FC_F32));
    MUST(call.all_reduce(call.context, comm, NULL, layer, seen_memory, 4, FC_BF16));
    CHECK(a.gathers == (n_ranks > 1) && a.scatters == 1 && a.reduces == 1);
    CHECK_EQ(n_streams, n_ranks > 1 ? 3 : 2);
    a.status = FC_ERR_GROUP;
    CHECK_EQ(call.all_gather(call.context, comm, NULL, layer, seen_memory, sizeof(float)),
             n_ranks > 1 ? FC_ERR_GROUP : FC_OK);
    MUST(fc_collectives_connect(all, "seen", &group)); /* the first stays */
    CHECK_EQ(a.released, 1);
    fc_collectives_destroy(all);
    CHECK_EQ(a.released, 2);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* ---- NCCL ---- */

static fc_nccl_group *open_among(const fc_nccl *nccl, ranks_host *host, int board, int rank, int n,
                                 int64_t timeout_ns)
{
    const fc_transport_config config = ranks_config(host, board, rank, n, timeout_ns);
    const fc_nccl_options options = {.nccl = nccl};
    fc_nccl_group *group = NULL;

    MUST(fc_nccl_group_create(&config, &options, &group));
    CHECK_OR_EXIT(group != NULL);
    return group;
}

static fc_nccl_group *open_group(const fc_nccl *nccl, ranks_host *host, int rank)
{
    return open_among(nccl, host, 0, rank, 1, TIMEOUT_NS);
}

static const fc_nccl *open_stand_in(void)
{
    const fc_nccl *nccl = NULL;
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);

    CHECK_OR_EXIT(n > 0);
    path[n] = '\0';
    (void)strcpy(strrchr(path, '/'), "/libnccl_stand_in.so");
    MUST(fc_nccl_open(path, false, &nccl));
    return nccl;
}

static bool at_once(void *arg)
{
    (void)arg;
    return true;
}

/* Factors reach who may scale; others say that they do not, but for 1. */
static void test_scales(void)
{
    asked plain = {0}, scaling = {0};
    const fc_collectives_group of_plain = own_group(&plain, 3);
    fc_collectives_group of_scaling = own_group(&scaling, 3);
    fc_collectives *all = make();

    of_scaling.may_scale = true;
    MUST(fc_collectives_connect(all, "plain", &of_plain));
    MUST(fc_collectives_connect(all, "scaling", &of_scaling));
    CHECK_EQ(fc_collectives_n_ranks(fc_collectives_find(all, "plain")), 3);
    CHECK(!fc_collectives_scale(fc_collectives_find(all, "plain"), 0.5));
    CHECK(fc_collectives_scale(fc_collectives_find(all, "plain"), 1));
    CHECK(plain.factor == 0);
    CHECK(fc_collectives_scale(fc_collectives_find(all, "scaling"), 0.5));
    CHECK(scaling.factor == 0.5);
    CHECK(fc_collectives_scale(fc_collectives_find(all, "scaling"), 1));
    CHECK(scaling.factor == 1);
    fc_collectives_destroy(all);
}

/* Reductions have one of their own: they run beside gathers. */
static void check_communicators(fc_collectives *all, const fc_nccl_group *shards)
{
    const fc_device_caller call = fc_collectives_caller(all);
    fc_device_comm *comm = fc_collectives_find(all, "shards");
    float from[4] = {0}, to[4];
    fc_nccl_deed deed = {0};
    uint64_t form = 0;

    CHECK_EQ(shards->comms[0].sequence, 1);
    CHECK_EQ(shards->comms[1].sequence, 0);
    MUST(call.reduce_scatter(call.context, comm, NULL, (fc_label){"unit", "reduce-scatter", 7}, to,
                             from, 4, FC_F32));
    CHECK(fc_nccl_board_own(shards->board, 1, &deed));
    CHECK_EQ(deed.detail, 7); /* of whose gradients: ranks that differ learn of it */
    MUST(call.all_reduce(call.context, comm, NULL, (fc_label){"unit", "all-reduce", 9}, to, 4,
                         FC_F32));
    CHECK(fc_nccl_board_own(shards->board, 1, &deed));
    CHECK_EQ(deed.detail, 9);
    CHECK_EQ(shards->comms[0].sequence, 1);
    CHECK_EQ(shards->comms[1].sequence, 2);
    for (size_t i = 0; i < 2; i++) { /* nor is one what swaps two sizes */
        const fc_gather gathers[] = {{&to[0], &from[0], 4 + 4 * i}, {&to[2], &from[2], 8 - 4 * i}};

        MUST(call.all_gather_each(call.context, comm, NULL, layer, gathers, 2));
        CHECK(fc_nccl_board_own(shards->board, 0, &deed));
        CHECK(i == 0 || deed.form != form);
        form = deed.form;
    }
}

/* Where one has failed the other ends, too, and each later call tells why. */
static void body_nccl(int rank, int n, void *arg)
{
    const fc_nccl *nccl = open_stand_in();
    const int64_t live = fc_alloc_live();
    ranks_host hosts[2];
    fc_nccl_group *groups[2] = {open_group(nccl, &hosts[0], 0), open_group(nccl, &hosts[1], 0)};
    asked kept = {0};
    fc_collectives *all = make();
    const fc_device_caller call = fc_collectives_caller(all);

    (void)rank;
    (void)n;
    (void)arg;
    for (int i = 0; i < 2; i++) {
        const fc_collectives_group by_nccl = {.context = &kept,
                                              .nccl = groups[i],
                                              .n_ranks = 1,
                                              .may_scale = true,
                                              .release = note_release};

        MUST(fc_collectives_connect(all, i == 0 ? "shards" : "replicas", &by_nccl));
    }
    CHECK(fc_collectives_has_groups(fc_collectives_find(all, "shards")));
    CHECK(!fc_collectives_scale(fc_collectives_find(all, "shards"), 0.5)); /* no average of one */
    CHECK(fc_collectives_scale(fc_collectives_find(all, "shards"), 1));
    MUST(gather(all, "shards", 4));
    MUST(gather(all, "replicas", 4));
    check_communicators(all, groups[0]);
    MUST(fc_collectives_watch(all));
    MUST(call.wait(call.context, at_once, NULL));
    CHECK_EQ(fc_nccl_abort(groups[0], FC_ERR_BROKEN, "no more of this"), FC_ERR_BROKEN);
    CHECK(!fc_nccl_is_broken(groups[1]));
    CHECK_EQ(gather(all, "shards", 4), FC_ERR_BROKEN);
    CHECK_HAS(fc_last_message(), "no more of this");
    CHECK(fc_nccl_is_broken(groups[1]));
    CHECK_EQ(gather(all, "replicas", 4), FC_ERR_BROKEN);
    CHECK_HAS(fc_last_message(), "no more of this");
    CHECK(fc_collectives_watch(all) != FC_OK);
    fc_collectives_destroy(all);
    CHECK_EQ(kept.released, 2);
    fc_nccl_group_destroy(groups[0]);
    fc_nccl_group_destroy(groups[1]);
    CHECK_EQ(fc_alloc_live(), live);
}

/* Of two groups that are waited for one is late: it is the one that is named, at any place among
 * them, whosever deadline it was, and both end. */
static void body_late(int rank, int n, void *arg)
{
    const int late = *(const int *)arg; /* the board of the group; the others are in time */
    const fc_nccl *nccl = open_stand_in();
    const int64_t live = fc_alloc_live();
    ranks_host hosts[2];
    fc_nccl_group *groups[2];
    asked kept = {0};
    fc_collectives_group by_nccl = {.context = &kept, .n_ranks = n, .release = note_release};
    fc_collectives *all = make();
    const fc_device_caller call = fc_collectives_caller(all);

    for (int i = 0; i < 2; i++) {
        groups[i] =
            open_among(nccl, &hosts[i], i, rank, n, i == 0 ? FC_NS_PER_S / 4 : FC_NS_PER_S / 2);
        by_nccl.nccl = groups[i];
        MUST(fc_collectives_connect(all, i == 0 ? "shards" : "replicas", &by_nccl));
    }
    for (int i = 0; i < 2; i++) {
        if (rank == 0 || i != late) {
            MUST(gather(all, i == 0 ? "shards" : "replicas", 4));
        }
    }
    if (rank == 0) {
        CHECK_EQ(call.wait(call.context, never, NULL), FC_ERR_TIMEOUT);
        CHECK_HAS(fc_last_message(), "rank 11 has called none");
        CHECK(fc_nccl_is_broken(groups[0]) && fc_nccl_is_broken(groups[1]));
        atomic_store(&ranks_common->values[0], 1);
    } else {
        CHECK(ranks_await(0, 1));
        for (int i = 0; i < 2; i++) {
            CHECK_EQ(fc_nccl_watch(groups[i]), FC_ERR_TIMEOUT);
            CHECK_HAS(fc_last_message(), "rank 10 failed: nothing came of it within");
            CHECK_HAS(fc_last_message(), "rank 11 has called none");
        }
    }
    fc_collectives_destroy(all);
    fc_nccl_group_destroy(groups[0]);
    fc_nccl_group_destroy(groups[1]);
    CHECK_EQ(fc_alloc_live(), live);
}

int main(void)
{
    test_process_groups();
    test_scales();
    check_in_sight(1);
    check_in_sight(2);
    ranks_check(1, body_nccl, NULL);
    for (int late = 0; late < 2; late++) {
        ranks_check(2, body_late, &late);
    }
    return check_result();
}
