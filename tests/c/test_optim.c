/* Optimizer steps by blocks, in any order and from several threads: the bits of one pass over each
 * parameter. */
#include "check.h"
#include "kernel_values.h"

#include "optim/clip.h"
#include "optim/optim.h"

#include <pthread.h>

enum {
    N_PARAMS = 9,
    N_ARRAYS = 5, /* parameter, gradient, three of state */
    N_THREADS = 3
};
#define ROOM (8 * FC_OPTIM_BLOCK)

typedef enum optim_kind {
    ADAM,
    AMSGRAD,
    ADAM_BY,
    SGD,
    SGD_WITH_MOMENTUM,
    N_KINDS
} optim_kind;

typedef struct group {
    float memory[N_ARRAYS][ROOM];
    fc_optim_param params[N_PARAMS];
    optim_kind kind;
    size_t fused_lanes, n_blocks;
} group;

static const fc_sgd sgd = {0.1f, 0.9f, 0.7f, -0.01f, false, false};

/* Empty, small and large ones, some of which end where a block does. */
static const size_t shapes[][N_PARAMS] = {
    {0, 1, 0, 17, FC_OPTIM_BLOCK - 18, 0, 5, 3 * FC_OPTIM_BLOCK + 3, 0},
    {FC_OPTIM_BLOCK, FC_OPTIM_BLOCK, 2 * FC_OPTIM_BLOCK, 0, 0, 0, 0, 0, 1},
    {3, 5, 7, 11, 13, 17, 19, 23, 29},
    {0, 0, 0, 0, 0, 0, 0, 0, 0},
};

static void take_roots(float *x, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        x[i] = sqrtf(x[i]);
    }
}

/* As above, but for one number. */
static void take_other_roots(float *x, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        x[i] = x[i] == 3.0f ? 1.5f : sqrtf(x[i]);
    }
}

static bool has_state(optim_kind kind, size_t state)
{
    return kind == AMSGRAD ? true : kind < SGD ? state < 2 : kind == SGD ? false : state == 0;
}

static void fill(group *g, const size_t *shape, optim_kind kind, size_t fused_lanes)
{
    const fc_adam_options options = {0.01, 0.9, 0.999, 1e-8, 0.1, true, false};
    size_t at = 0;

    g->kind = kind;
    g->fused_lanes = fused_lanes;
    for (size_t a = 0; a < N_ARRAYS; a++) {
        for (size_t i = 0; i < ROOM; i++) {
            g->memory[a][i] = (float)(random_bits() % 1024) / 512.0f + (a < 2 ? -1.0f : 0.0f);
        }
    }
    for (size_t i = 0; i < N_PARAMS; at += shape[i] + 1, i++) { /* one of nobody's in between */
        fc_optim_param *p = &g->params[i];

        *p = (fc_optim_param){
            .param = g->memory[0] + at, .grad = g->memory[1] + at, .numel = shape[i]};
        for (size_t s = 0; s < 3; s++) {
            p->state[s] = has_state(kind, s) ? g->memory[2 + s] + at : NULL;
        }
        fc_adam_set(&p->adam, &options, (double)(i + 1));
    }
    g->n_blocks = fc_optim_cut(g->params, N_PARAMS);
}

/* What a block has to give, for a whole parameter. */
static void step_whole(const group *g, const fc_optim_param *p)
{
    const size_t n_tail = g->fused_lanes == 0 ? 0 : p->numel % g->fused_lanes;

    if (g->kind >= SGD) {
        fc_kern()->sgd(&sgd, p->param, p->grad, p->state[0], p->numel, n_tail);
    } else {
        fc_kern()->adam(&p->adam, FC_ROOT_NEAREST, p->param, p->grad, p->state[0], p->state[1],
                        p->state[2], p->numel, g->kind == ADAM_BY ? 0 : n_tail);
    }
}

static void step_block(const group *g, size_t block)
{
    const fc_optim_rule rule = {.is_adam = g->kind < SGD,
                                .root = g->kind == ADAM_BY ? FC_ROOT_COUNT : FC_ROOT_NEAREST,
                                .roots = take_roots,
                                .sgd = sgd,
                                .fused_lanes = g->fused_lanes};

    fc_optim_step(g->params, N_PARAMS, block, &rule);
}

typedef struct worker {
    const group *group;
    size_t number;
} worker;

/* Every third block, the last one first. */
static void *work(void *arg)
{
    const worker *self = arg;

    for (size_t block = self->group->n_blocks; block-- > 0;) {
        if (block % N_THREADS == self->number) {
            step_block(self->group, block);
        }
    }
    return NULL;
}

static void step_by_blocks(const group *g)
{
    pthread_t threads[N_THREADS];
    worker workers[N_THREADS];

    for (size_t i = 0; i < N_THREADS; i++) {
        workers[i] = (worker){g, i};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (size_t i = 0; i < N_THREADS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
}

/* Both begin with the same numbers. */
static void test_blocks(const size_t *shape, optim_kind kind, size_t fused_lanes)
{
    static group g, start;
    size_t numel = 0;

    fill(&g, shape, kind, fused_lanes);
    memcpy(start.memory, g.memory, sizeof(g.memory));
    step_by_blocks(&g);
    for (size_t a = 0; a < N_ARRAYS; a++) { /* what blocks made goes to `start` */
        for (size_t i = 0; i < ROOM; i++) {
            const float made = g.memory[a][i];

            g.memory[a][i] = start.memory[a][i];
            start.memory[a][i] = made;
        }
    }
    for (size_t i = 0; i < N_PARAMS; i++) {
        CHECK(g.params[i].first == numel);
        numel += shape[i];
        step_whole(&g, &g.params[i]);
    }
    CHECK(g.n_blocks == (numel + FC_OPTIM_BLOCK - 1) / FC_OPTIM_BLOCK);
    CHECK_MSG(memcmp(start.memory, g.memory, sizeof(g.memory)) == 0,
              "kind %d, first parameter of %zu, fused %zu", (int)kind, shape[0], fused_lanes);
}

static void test_keys(void)
{
    const fc_optim_rule adam = {.is_adam = true, .n_state = 3}, momentum = {.n_state = 1};

    CHECK(strcmp(fc_optim_key(&adam, 0), "exp_avg") == 0);
    CHECK(strcmp(fc_optim_key(&adam, 2), "max_exp_avg_sq") == 0);
    CHECK(strcmp(fc_optim_key(&momentum, 0), "momentum_buffer") == 0);
}

static void test_roots(void)
{
    CHECK(fc_optim_root_of(take_roots) == FC_ROOT_NEAREST);
    CHECK(fc_optim_root_of(take_other_roots) == FC_ROOT_COUNT);
}

enum {
    N_TENSORS = 300,
    LENGTH_MAX = 40
};

static float clipped[N_TENSORS][LENGTH_MAX];

/* Of few lengths, none and one among them. */
static void fill_tensors(float **data, size_t *lengths)
{
    for (size_t i = 0; i < N_TENSORS; i++) {
        lengths[i] = random_bits() % 5 == 0 ? random_bits() % 3 : random_bits() % LENGTH_MAX;
        data[i] = clipped[i];
        for (size_t j = 0; j < LENGTH_MAX; j++) {
            clipped[i][j] = (float)(random_bits() % 1024) / 512.0f - 1.0f;
        }
    }
}

static void test_order(const size_t *lengths, const size_t *order)
{
    for (size_t i = 1; i < N_TENSORS; i++) {
        const size_t before = order[i - 1], after = order[i];

        CHECK(lengths[before] > lengths[after] ||
              (lengths[before] == lengths[after] && before < after));
    }
}

/* In parts, the last one first, beside one tensor at a time. */
static void test_clip(void)
{
    float *data[N_TENSORS], norms[N_TENSORS], before[N_TENSORS][LENGTH_MAX];
    size_t lengths[N_TENSORS], order[N_TENSORS];
    const fc_clip_tensors all = {data, lengths, order};

    fill_tensors(data, lengths);
    fc_clip_order(lengths, N_TENSORS, order);
    test_order(lengths, order);
    memcpy(before, clipped, sizeof(before));
    fc_clip_norms(&all, 150, N_TENSORS, norms);
    fc_clip_norms(&all, 0, 150, norms);
    fc_clip_multiply(&all, 7, N_TENSORS, 0.3f);
    fc_clip_multiply(&all, 0, 7, 0.3f);
    for (size_t i = 0; i < N_TENSORS; i++) {
        const float *one = before[i];
        float norm;

        fc_kern()->norms(&norm, &one, &lengths[i], 1);
        CHECK(norms[i] == (lengths[i] == 1 ? fabsf(one[0]) : norm));
        for (size_t j = 0; j < LENGTH_MAX; j++) {
            CHECK(clipped[i][j] == (j < lengths[i] ? one[j] * 0.3f : one[j]));
        }
    }
}

static void test_clip_factor(void)
{
    CHECK(fc_clip_factor_of(1.0f, 0.5f) == 1.0f);
    CHECK(fc_clip_factor_of(1.0f, 4.0f) == 1.0f / (4.0f + 1e-6f));
    CHECK(isnan(fc_clip_factor_of(1.0f, NAN)));
    CHECK(!fc_clip_flushes_denormals());
}

int main(void)
{
    for (size_t s = 0; s < COUNT(shapes); s++) {
        for (optim_kind kind = ADAM; kind < N_KINDS; kind++) {
            test_blocks(shapes[s], kind, 0);
            test_blocks(shapes[s], kind, 8);
        }
    }
    test_keys();
    test_roots();
    test_clip();
    test_clip_factor();
    return check_result();
}
