/* Sums over messages that are begun when they are submitted and ended later. The peer sends what
 * this rank sends. */
#include "ranks.h"
#include "refused_messages.h"

#include "base/alloc.h"
#include "engine/batch.h"
#include "engine/reduction.h"
#include "engine/unit.h"

#define N_UNITS 2
#define N_RANKS 2
#include "alike_ranks.h"
#define N_PARAMS 3
#define NUMEL ((size_t)6)
#define ODD ((size_t)5) /* of the others: one rank has less */

typedef struct owner {
    fc_reduction *reduction;
    float sum[N_PARAMS][NUMEL / N_RANKS];
    bool has, is_asked[N_PARAMS];
} owner;

static bool is_gone; /* the peer: sums end without it */
static bool is_lent; /* what is sent is read to the end */
static int n_begun, n_ended, n_dropped, n_at_once;
static const char *begun_send;
static size_t begun_numel;
static fc_dtype begun_dtype;
static char kept[4096]; /* what was sent last */

/* ---- the owner ---- */

static fc_status get_options(void *of, fc_reduce_options *out)
{
    (void)of;
    *out = (fc_reduce_options){2, true, false, false};
    return FC_OK;
}

static fc_status no_flat(void *of, void **out)
{
    (void)of;
    *out = NULL;
    return FC_OK;
}

static fc_status assign_flat(void *of, const fc_reduce_options *options)
{
    (void)of, (void)options;
    return FC_ERR_STATE;
}

static fc_status prepare(void *of)
{
    (void)of;
    return FC_OK;
}

static fc_status get_target(void *of, size_t param, void **out, bool *accumulate)
{
    owner *o = of;

    o->is_asked[param] = true;
    *out = o->sum[param];
    *accumulate = o->has;
    return FC_OK;
}

static fc_status assign(void *of, size_t param, const fc_reduce_options *options)
{
    (void)param, (void)options;
    ((owner *)of)->has = true;
    return FC_OK;
}

static void release(void *memory)
{
    free(memory);
}

static void wait_for_room(void *of, bool begins)
{
    (void)of, (void)begins;
}

static size_t find_frozen(void *of, size_t from)
{
    (void)of, (void)from;
    return SIZE_MAX;
}

static const fc_reduction_ops ops = {get_options, no_flat, assign_flat,   prepare,     get_target,
                                     assign,      release, wait_for_room, find_frozen, NULL};

/* ---- messages ---- */

static void add(void *recv, const char *send, size_t numel)
{
    float x;

    for (size_t i = 0; i < numel; i++) {
        memcpy(&x, send + i * sizeof(x), sizeof(x));
        x *= N_RANKS;
        memcpy((char *)recv + i * sizeof(x), &x, sizeof(x));
    }
}

static fc_status reduce_scatter(void *context, void *recv, void *send, size_t numel, fc_dtype dtype)
{
    (void)context, (void)dtype;
    n_at_once++;
    add(recv, send, numel);
    return FC_OK;
}

static fc_status sum_begin(void *context, void *send, size_t numel, fc_dtype dtype, bool *lent_out)
{
    (void)context;
    if (begun_send != NULL) {
        return FC_AGAIN;
    }
    CHECK_OR_EXIT(N_RANKS * numel * fc_dtype_bytes(dtype) <= sizeof(kept));
    memcpy(kept, send, N_RANKS * numel * fc_dtype_bytes(dtype));
    begun_dtype = dtype;
    begun_send = is_lent ? send : kept;
    begun_numel = numel;
    *lent_out = is_lent;
    n_begun++;
    return FC_OK;
}

static fc_status sum_end(void *context, void *recv)
{
    (void)context;
    n_ended++;
    if (is_gone) {
        begun_send = NULL;
        return fc_fail(FC_ERR_GROUP, "nobody is there");
    }
    add(recv, begun_send, begun_numel);
    begun_send = NULL;
    return FC_OK;
}

static void sum_drop(void *context)
{
    (void)context;
    n_dropped += begun_send != NULL;
    begun_send = NULL;
}

static fc_transport *create_transport(void)
{
    static const int global_ranks[N_RANKS] = {0, 1};
    const fc_transport_config config = {.name = "test group",
                                        .n_ranks = N_RANKS,
                                        .global_ranks = global_ranks,
                                        .timeout_ns = FC_NS_PER_S,
                                        .host = {.exchange = exchange}};
    fc_message_ops messages = refused_messages;
    fc_transport *transport = NULL;

    messages.all_gather = all_gather; /* of ranks' phases */
    messages.reduce_scatter = reduce_scatter;
    messages.sum_begin = sum_begin;
    messages.sum_end = sum_end;
    messages.sum_drop = sum_drop;
    CHECK_OR_EXIT(fc_callback_create(&config, &messages, &transport) == FC_OK);
    return transport;
}

/* ---- tests ---- */

typedef struct world {
    fc_transport *transport;
    fc_domain *domain;
    fc_slots *slots;
    owner owners[N_UNITS];
} world;

static bool are_packed, has_frozen; /* the last parameter */

static void make_world_of(world *w, fc_dtype reduce)
{
    fc_param param = {.outer = 1,
                      .rows = ODD,
                      .inner = 1,
                      .orig = FC_F32,
                      .compute = FC_F32,
                      .reduce = reduce,
                      .grad = FC_F32,
                      .has_grad = true,
                      .is_counted = !are_packed,
                      .is_packed = are_packed,
                      .trainable = true};
    fc_param params[N_PARAMS] = {param, param, param};
    const fc_unit_desc units[N_UNITS] = {{"first", params, N_PARAMS}, {"second", params, N_PARAMS}};

    params[0].rows = NUMEL;
    params[N_PARAMS - 1].trainable = !has_frozen;
    *w = (world){.transport = create_transport()};
    n_begun = n_ended = n_dropped = n_at_once = 0;
    CHECK_OR_EXIT(fc_slots_create(&w->slots) == FC_OK);
    CHECK_OR_EXIT(fc_domain_create(w->transport, FC_DOMAIN_SHARD, units, N_UNITS, 0, N_RANKS,
                                   &w->domain) == FC_OK);
    fc_domain_link(&w->domain, 1);
    fc_batch_limit(w->domain, 1); /* all travel alone */
    for (size_t u = 0; u < N_UNITS; u++) {
        owner *o = &w->owners[u];

        CHECK_OR_EXIT(fc_reduction_create(fc_domain_unit(w->domain, u), NULL, w->slots, &ops,
                                          &o->reduction) == FC_OK);
        fc_reduction_attach(o->reduction, o);
    }
}

static void make_world(world *w)
{
    make_world_of(w, FC_F32);
}

static void end_reduction(owner *o)
{
    fc_reduction_attach(o->reduction, NULL);
    fc_reduction_destroy(o->reduction);
    o->reduction = NULL;
}

static void end_world(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        if (w->owners[u].reduction != NULL) {
            end_reduction(&w->owners[u]);
        }
    }
    fc_slots_trim(w->slots);
    CHECK_EQ(fc_slots_bytes(w->slots), 0); /* nothing was kept */
    fc_domain_destroy(w->domain);
    fc_slots_destroy(w->slots);
    fc_transport_destroy(w->transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void open(world *w)
{
    fc_domain_open(w->domain, (fc_opening){FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN});
}

/* Gradients of the first `n` parameters. */
static fc_status try_to_submit(world *w, size_t u, float value, size_t n)
{
    static const fc_reduce_options options = {2, true, false, false};
    float *data = malloc(NUMEL * sizeof(*data));
    fc_gradient *grads = calloc(N_PARAMS, sizeof(*grads));
    fc_status st;

    for (size_t i = 0; i < NUMEL; i++) {
        data[i] = value + (float)i;
    }
    for (size_t i = 0; i < n; i++) {
        grads[i] = (fc_gradient){.data = data, .dtype = FC_F32, .is_wanted = true};
    }
    st = fc_reduction_submit(w->owners[u].reduction, grads, grads, &options);
    free(data); /* it was copied */
    return st;
}

static void submit_some(world *w, size_t u, float value, size_t n)
{
    CHECK_EQ(try_to_submit(w, u, value, n), FC_OK);
}

static void submit(world *w, size_t u, float value)
{
    submit_some(w, u, value, 1);
}

/* The mean of two ranks that have the same, `times` over. */
static void check_sum(const owner *o, float value, float times)
{
    CHECK(o->has);
    for (size_t i = 0; i < NUMEL / N_RANKS; i++) {
        CHECK(o->sum[0][i] == times * (value + (float)i));
    }
}

static void finish(world *w)
{
    CHECK_EQ(fc_reduction_finish_all(&w->domain, 1), FC_OK);
    CHECK_EQ(fc_domain_close(w->domain), FC_OK);
}

/* One travels until the next submission, the last one until the end. */
static void test_ended_by_the_next(void)
{
    world w;

    make_world(&w);
    open(&w);
    submit(&w, 1, 10);
    CHECK_EQ(n_begun, 1);
    CHECK_EQ(fc_reduction_finish_ready(w.domain, FC_SEARCH_OLDEST), FC_OK);
    CHECK(!w.owners[1].has);
    submit(&w, 0, 20);
    CHECK_EQ(n_begun, 2);
    CHECK_EQ(n_ended, 1);
    check_sum(&w.owners[1], 10, 1);
    CHECK(!w.owners[0].has);
    finish(&w);
    CHECK_EQ(n_ended, 2);
    check_sum(&w.owners[0], 20, 1);
    open(&w); /* and on top of what is there */
    submit(&w, 0, 20);
    submit(&w, 0, 20);
    finish(&w);
    check_sum(&w.owners[0], 20, 3);
    CHECK_EQ(n_at_once, 0);
    end_world(&w);
}

/* A backward that fails, and a unit that goes, end what was begun without a use. */
static void test_dropped(void)
{
    world w;

    make_world(&w);
    open(&w);
    submit(&w, 1, 10);
    fc_domain_fail(w.domain);
    CHECK_EQ(n_dropped, 0); /* to drop it is to wait for it: the failure is told first */
    open(&w);
    CHECK_EQ(n_dropped, 1);
    submit(&w, 1, 30);
    CHECK(!w.owners[1].has);
    finish(&w);
    check_sum(&w.owners[1], 30, 1);
    open(&w);
    submit(&w, 0, 10);
    end_reduction(&w.owners[1]); /* which has begun none */
    CHECK_EQ(n_dropped, 1);
    end_reduction(&w.owners[0]);
    CHECK_EQ(n_dropped, 2);
    end_world(&w);
}

/* A sum that does not come is told to whoever ends it, and nothing is made of it. */
static void test_gone(void)
{
    world w;

    make_world(&w);
    for (int is_at_end = 0; is_at_end < 2; is_at_end++) {
        open(&w);
        submit(&w, 1, 10);
        is_gone = true;
        CHECK_EQ(is_at_end ? fc_reduction_finish_all(&w.domain, 1) : try_to_submit(&w, 0, 20, 1),
                 FC_ERR_GROUP);
        CHECK_HAS(fc_last_message(), "reduction of FSDP unit 'second' failed");
        is_gone = false;
        CHECK_EQ(n_begun, is_at_end + 1);
        fc_domain_fail(w.domain);
        CHECK(!w.owners[0].has && !w.owners[1].has);
    }
    open(&w);
    submit(&w, 1, 30);
    finish(&w);
    check_sum(&w.owners[1], 30, 1);
    CHECK_EQ(n_dropped, 0);
    end_world(&w);
}

/* Sums travel in the type in which they are made. */
static void test_narrow(void)
{
    world w;

    make_world_of(&w, FC_BF16);
    open(&w);
    submit(&w, 0, 10);
    CHECK_EQ(begun_dtype, FC_BF16);
    CHECK_EQ(begun_numel * fc_dtype_bytes(FC_BF16),
             fc_unit_layout(fc_domain_unit(w.domain, 0))->trainable_part_bytes);
    fc_domain_fail(w.domain);
    end_world(&w);
    CHECK_EQ(n_dropped, 1);
}

/* A sum for which there is no memory is not begun, and the next one is right. */
static void test_no_memory(void)
{
    static const fc_reduce_options options = {2, true, false, false};
    fc_status st = FC_ERR_NOMEM;
    int n = 0;
    world w;

    make_world(&w);
    while (st != FC_OK) {
        fc_gradient *grads = calloc(N_PARAMS, sizeof(*grads));
        const float data[NUMEL] = {0};

        grads[0] = (fc_gradient){.data = data, .dtype = FC_F32, .is_wanted = true};
        open(&w);
        fc_alloc_fail_after(n++);
        st = fc_reduction_submit(w.owners[0].reduction, grads, grads, &options);
        fc_alloc_fail_after(-1);
        CHECK(st == FC_OK || st == FC_ERR_NOMEM);
        CHECK_EQ(n_begun, st == FC_OK);
    }
    CHECK(n > 1);
    finish(&w);
    CHECK(w.owners[0].has);
    end_world(&w);
}

/* Another domain's sum is under way, or units share nothing: it is made at once. */
static void test_at_once(void)
{
    world w;

    make_world(&w);
    open(&w);
    begun_send = "another's";
    submit(&w, 0, 10);
    begun_send = NULL;
    CHECK_EQ(n_at_once, 1);
    check_sum(&w.owners[0], 10, 1);
    fc_batch_limit(w.domain, 0);
    submit(&w, 1, 10);
    CHECK_EQ(n_at_once, 2);
    check_sum(&w.owners[1], 10, 1);
    finish(&w);
    CHECK_EQ(n_begun, 0);
    end_world(&w);
    are_packed = true; /* nothing tells behind it who has a gradient */
    make_world(&w);
    open(&w);
    submit(&w, 0, 10);
    CHECK_EQ(n_at_once, 1);
    check_sum(&w.owners[0], 10, 1);
    finish(&w);
    CHECK_EQ(n_begun, 0);
    end_world(&w);
    are_packed = false;
}

/* What is lent is nobody else's until the sum has ended. */
static void test_lent_memory(void)
{
    void *memory = NULL;
    world w;

    make_world(&w);
    open(&w);
    submit(&w, 1, 10);
    CHECK_EQ(fc_slots_acquire(w.slots, 1, &memory), FC_OK);
    CHECK(memory != begun_send);
    fc_slots_release(w.slots, memory);
    finish(&w);
    check_sum(&w.owners[1], 10, 1);
    end_world(&w);
}

/* What lay behind a sum says nothing of parameters that it does not move. */
static void test_frozen(void)
{
    void *memory[2] = {NULL};
    world w;

    has_frozen = true;
    make_world(&w);
    for (size_t i = 0; i < 2; i++) {
        CHECK_EQ(fc_slots_acquire(w.slots, FC_PAGE, &memory[i]), FC_OK);
        memset(memory[i], 1, FC_PAGE);
    }
    fc_slots_release(w.slots, memory[0]);
    fc_slots_release(w.slots, memory[1]);
    open(&w);
    submit(&w, 0, 10);
    CHECK_EQ(n_begun, 1);
    finish(&w);
    check_sum(&w.owners[0], 10, 1);
    CHECK(!w.owners[0].is_asked[N_PARAMS - 1]);
    end_world(&w);
    has_frozen = false;
}

/* How many words of a rank's part are not zero. */
static size_t n_written(const world *w, size_t rank)
{
    const size_t bytes = fc_unit_layout(fc_domain_unit(w->domain, 0))->trainable_part_bytes;
    size_t n = 0;

    CHECK_OR_EXIT(N_RANKS * bytes <= sizeof(kept));
    for (size_t at = 0; at < bytes; at += sizeof(float)) {
        static const float zero = 0;

        n += memcmp(kept + rank * bytes + at, &zero, sizeof(zero)) != 0;
    }
    return n;
}

/* Zeros are sent where there is no gradient, whatever lay there before; and counts of ranks. */
static void test_zeros(void)
{
    world w;

    make_world(&w);
    open(&w);
    submit_some(&w, 0, 1, N_PARAMS);
    CHECK_EQ(n_written(&w, 0), NUMEL / 2 + 2 * 3 + N_PARAMS);
    CHECK_EQ(n_written(&w, 1), NUMEL / 2 + 2 * 2 + N_PARAMS);
    submit_some(&w, 0, 1, 1);
    CHECK_EQ(n_written(&w, 0), NUMEL / 2 + 1);
    CHECK_EQ(n_written(&w, 1), NUMEL / 2 + 1);
    submit_some(&w, 0, 1, 0);
    CHECK_EQ(n_written(&w, 0) + n_written(&w, 1), 0);
    submit_some(&w, 1, 1, 2);
    CHECK_EQ(n_written(&w, 0), NUMEL / 2 + 3 + 2);
    CHECK_EQ(n_written(&w, 1), NUMEL / 2 + 2 + 2);
    finish(&w);
    end_world(&w);
}

int main(void)
{
    for (int lent = 0; lent < 2; lent++) {
        is_lent = lent != 0;
        test_ended_by_the_next();
        test_dropped();
        test_gone();
        test_narrow();
        test_no_memory();
        test_at_once();
        test_lent_memory();
        test_frozen();
        test_zeros();
    }
    return check_result();
}
