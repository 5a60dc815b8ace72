/* What a rank sends of a unit's gradients over messages, byte for byte: sections after sections,
 * each for rank after rank, zeros where there is no gradient, and counts of who has one.
 */
#include "check.h"
#include "guarded.h"
#include "refused_messages.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "engine/batch.h"
#include "engine/reduction.h"
#include "engine/unit.h"
#include "kernels/kernels.h"

#define N_RANKS 4
#include "alike_ranks.h"
#define RANK 1
#define N_PARAMS ((size_t)4 * FC_FLOAT_COUNT) /* of each type two that are trained, two frozen */
#define NUMEL ((size_t)2 * 3 * 90)
#define ROUNDS 60
#define ROOM ((size_t)64 << 10)
#define UNTOUCHED 0x55

#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        const fc_status check_status_ = (call);                                                    \
        CHECK_MSG(check_status_ == FC_OK, "%s: %s", #call, fc_last_message());                     \
    } while (0)

/* ---- a group whose sums are zero ---- */

static char sent[ROOM];
static size_t n_sums, sent_bytes;

static fc_status reduce_scatter(void *context, void *recv, void *send, size_t numel, fc_dtype dtype)
{
    const size_t bytes = numel * fc_dtype_bytes(dtype);

    (void)context;
    CHECK_OR_EXIT(sent_bytes + N_RANKS * bytes <= ROOM);
    memcpy(sent + sent_bytes, send, N_RANKS * bytes);
    sent_bytes += N_RANKS * bytes;
    n_sums++;
    memset(recv, 0, bytes);
    return FC_OK;
}

static fc_transport *create_transport(void)
{
    static const int global_ranks[N_RANKS] = {10, 11, 12, 13};
    const fc_transport_config config = {.name = "test group",
                                        .rank = RANK,
                                        .n_ranks = N_RANKS,
                                        .global_ranks = global_ranks,
                                        .timeout_ns = FC_NS_PER_S,
                                        .host = {.exchange = exchange}};
    fc_message_ops messages = refused_messages;
    fc_transport *transport = NULL;

    messages.all_gather = all_gather; /* of ranks' phases */
    messages.reduce_scatter = reduce_scatter;
    CHECK_OR_EXIT(fc_callback_create(&config, &messages, &transport) == FC_OK);
    return transport;
}

/* ---- an owner who gets nothing ---- */

static fc_status get_options(void *of, fc_reduce_options *out)
{
    (void)of;
    *out = (fc_reduce_options){N_RANKS, true, false, false};
    return FC_OK;
}

static fc_status no_flat(void *of, void **out)
{
    (void)of;
    *out = NULL;
    return FC_OK;
}

static fc_status prepare(void *of)
{
    (void)of;
    return FC_OK;
}

static fc_status refuse_target(void *of, size_t param, void **out, bool *accumulate)
{
    (void)of, (void)out, (void)accumulate;
    return fc_fail(FC_ERR_STATE, "parameter %zu has a sum", param);
}

static void release(void *memory)
{
    guarded_destroy(memory, N_PARAMS * sizeof(fc_gradient));
}

static size_t find_frozen(void *of, size_t from)
{
    (void)of, (void)from;
    return SIZE_MAX;
}

static const fc_reduction_ops ops = {.options = get_options,
                                     .flat = no_flat,
                                     .prepare = prepare,
                                     .target = refuse_target,
                                     .release = release,
                                     .find_frozen = find_frozen};

/* ---- the unit ---- */

static uint64_t state = 1;

static size_t draw(size_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (size_t)((state >> 33) % below);
}

/* Types in turn, of neighbours one is frozen; or of one type alone. */
static void make_params(fc_param *params, size_t n)
{
    for (size_t i = 0; i < N_PARAMS; i++) {
        const fc_dtype type = (fc_dtype)(i / 2 % FC_FLOAT_COUNT);

        params[i] = (fc_param){.outer = 1 + draw(2),
                               .rows = 1 + draw(3) * draw(30),
                               .inner = 1 + draw(3),
                               .orig = FC_F32,
                               .compute = FC_F32,
                               .reduce = type,
                               .grad = FC_F32,
                               .has_grad = true,
                               .trainable = i % 2 == n % 2 || (n >= 2 && type != FC_F16),
                               .is_counted = true};
    }
}

/* What all ranks get of a parameter, in the reduce dtype. */
static void put(char *to, const fc_layout *layout, size_t i, const float *grad)
{
    static const float one = 1;
    const fc_param *p = &layout->params[i];
    const fc_section *section = fc_layout_section(layout, p);
    const fc_cast_fn cast = fc_kern_cast(FC_F32, p->reduce);
    const size_t item = fc_dtype_bytes(p->reduce);

    CHECK_OR_EXIT(section != NULL);
    for (int r = 0; r < N_RANKS; r++) {
        const size_t numel = fc_layout_rows(p, r, N_RANKS) * p->inner;
        char *chunk =
            to + N_RANKS * section->at + (size_t)r * section->bytes + (p->part_at - section->at);

        for (size_t o = 0; o < p->outer; o++) {
            const size_t first = (o * p->rows + (size_t)r * p->chunk_rows) * p->inner;

            cast(chunk + o * numel * item, grad + first, numel);
        }
        cast(chunk + p->chunk_numel * item, &one, 1);
    }
}

/* Some gradients, in memory where all kinds of things have been, and what is sent of them. */
static void check_some(fc_reduction *r, const fc_layout *layout, fc_slots *slots, int round)
{
    static const fc_reduce_options options = {N_RANKS, true, false, false};
    static float grad[N_PARAMS][NUMEL];
    static char expected[ROOM];
    const bool has_frozen = round % 2 == 1; /* some are trained now, with gradients or without */
    size_t wanted = draw(N_PARAMS);
    const size_t bytes = has_frozen ? layout->part_bytes : layout->trainable_part_bytes;
    const size_t end = fc_round_up(N_RANKS * bytes, FC_ALIGN) + sizeof(uint64_t); /* and a mask */
    fc_gradient *grads = guarded_create(N_PARAMS * sizeof(*grads));
    void *memory = NULL;

    while (layout->params[wanted].trainable) {
        wanted = draw(N_PARAMS);
    }
    CHECK_OR_EXIT(end < ROOM);
    memset(expected, 0, sizeof(expected));
    for (size_t i = 0; i < N_PARAMS; i++) {
        const bool is_all = round < 2;
        const bool may = layout->params[i].trainable || (has_frozen && round % 4 == 1);

        for (size_t k = 0; k < NUMEL; k++) {
            grad[i][k] = (float)(1 + draw(64));
        }
        grads[i].dtype = FC_F32;
        grads[i].is_wanted = layout->params[i].trainable || (has_frozen && i == wanted);
        if (may && (is_all || draw((size_t)round) % 3 == 0)) {
            grads[i].data = grad[i];
            put(expected, layout, i, grad[i]);
        }
    }
    CHECK_OK(fc_slots_acquire(slots, ROOM, &memory));
    memset(memory, UNTOUCHED, ROOM);
    fc_slots_release(slots, memory); /* it is taken next */
    n_sums = sent_bytes = 0;
    CHECK_OK(fc_reduction_submit(r, grads, grads, &options));
    CHECK_EQ(n_sums, layout->n_sections + (has_frozen ? layout->n_frozen : 0));
    CHECK_EQ(sent_bytes, N_RANKS * bytes);
    CHECK_MSG(memcmp(sent, expected, sent_bytes) == 0, "round %d", round);
    for (size_t at = end; at < ROOM; at++) {
        CHECK_MSG(((char *)memory)[at] == UNTOUCHED, "round %d, byte %zu of %zu", round, at, end);
    }
}

typedef struct world {
    fc_transport *transport;
    fc_domain *domain;
    fc_slots *slots;
    fc_reduction *r;
} world;

/* In its backward. */
static void join(world *w, fc_param *params, size_t n_params)
{
    const fc_unit_desc desc = {"unit", params, n_params};
    fc_unit *unit;

    w->transport = create_transport();
    CHECK_OK(fc_slots_create(&w->slots));
    CHECK_OR_EXIT(fc_domain_create(w->transport, FC_DOMAIN_SHARD, &desc, 1, RANK, N_RANKS,
                                   &w->domain) == FC_OK);
    fc_domain_link(&w->domain, 1);
    unit = fc_domain_unit(w->domain, 0);
    CHECK_OK(fc_reduction_create(unit, NULL, w->slots, &ops, &w->r));
    fc_reduction_attach(w->r, &state);
    fc_domain_open(w->domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
}

static void leave(world *w)
{
    fc_domain_mark_closed(w->domain);
    CHECK_OK(fc_domain_close(w->domain));
    fc_reduction_destroy(w->r);
    fc_domain_destroy(w->domain);
    fc_slots_destroy(w->slots);
    fc_transport_destroy(w->transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_all_types(void)
{
    for (size_t n = 0; n < 4; n++) {
        fc_param params[N_PARAMS];
        const fc_layout *layout;
        world w;

        make_params(params, n);
        join(&w, params, N_PARAMS);
        layout = fc_unit_layout(fc_domain_unit(w.domain, 0));
        CHECK_EQ(layout->n_sections, FC_FLOAT_COUNT);
        CHECK_EQ(layout->n_frozen, n < 2 ? FC_FLOAT_COUNT : 1);
        for (int round = 0; round < ROUNDS; round++) {
            check_some(w.r, layout, w.slots, round);
        }
        leave(&w);
    }
}

/* A frozen parameter without elements is trained now: nothing travels of it, so that the unit may
 * share a sum. */
static void test_empty(void)
{
    static const fc_reduce_options options = {N_RANKS, true, false, false};
    static const float ones[N_RANKS] = {1, 1, 1, 1};
    fc_gradient *grads = guarded_create(N_PARAMS * sizeof(*grads));
    fc_param params[N_PARAMS];
    world w;

    make_params(params, 0);
    for (size_t i = 0; i < 2; i++) {
        params[i].outer = params[i].inner = 1;
        params[i].rows = i == 0 ? N_RANKS : 0;
        params[i].is_counted = false;
        grads[i].is_wanted = true;
    }
    join(&w, params, 2);
    fc_batch_limit(w.domain, ROOM);
    grads[0] = (fc_gradient){.data = ones, .dtype = FC_F32, .is_wanted = true};
    n_sums = sent_bytes = 0;
    CHECK_OK(fc_reduction_submit(w.r, grads, grads, &options));
    CHECK_EQ(n_sums, 0);
    CHECK_OK(fc_reduction_finish_all(&w.domain, 1));
    CHECK_EQ(n_sums, 1);
    leave(&w);
}

int main(void)
{
    test_all_types();
    test_empty();
    return check_result();
}
