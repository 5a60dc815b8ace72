/* Optimizer steps by blocks: each kernel runs over a block's part of each parameter. */
#include "optim/optim.h"

#include "base/alloc.h"

#include <stdalign.h>
#include <stdint.h>
#include <string.h>

/* Elements of a parameter that lie in one block. */
typedef struct part {
    const fc_optim_param *of;
    size_t start, numel; /* numel 0: none are left */
} part;

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

size_t fc_optim_cut(fc_optim_param *params, size_t n_params)
{
    size_t numel = 0;

    for (size_t i = 0; i < n_params; i++) {
        params[i].first = numel;
        numel += params[i].numel;
    }
    return (numel + FC_OPTIM_BLOCK - 1) / FC_OPTIM_BLOCK;
}

/* From element `at` of all on, up to the end of its parameter or to `end`. */
static part part_at(const fc_optim_param *param, size_t at, size_t end)
{
    while (at < end && param->first + param->numel <= at) {
        param++;
    }
    return at < end
               ? (part){param, at - param->first, smaller(end, param->first + param->numel) - at}
               : (part){param, 0, 0};
}

/* There is a parameter. */
static size_t end_of(const fc_optim_param *params, size_t n_params, size_t block)
{
    const fc_optim_param *last = &params[n_params - 1];

    return smaller((block + 1) * FC_OPTIM_BLOCK, last->first + last->numel);
}

static part first_part(const fc_optim_param *params, size_t n_params, size_t block)
{
    size_t low = 0, high = n_params;

    while (high - low > 1) { /* the last one that begins there or before */
        const size_t middle = low + (high - low) / 2;

        if (params[middle].first <= block * FC_OPTIM_BLOCK) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return part_at(&params[low], block * FC_OPTIM_BLOCK, end_of(params, n_params, block));
}

static part next_part(part p, size_t end)
{
    return part_at(p.of, p.of->first + p.start + p.numel, end);
}

static float *from(float *memory, size_t start)
{
    return memory == NULL ? NULL : memory + start;
}

/* How many of its elements PyTorch's fused kernel takes after its last whole vector. */
static size_t tail_of(part p, size_t fused_lanes)
{
    const size_t tail = fused_lanes == 0 ? p.of->numel : p.of->numel - p.of->numel % fused_lanes;
    const size_t end = p.start + p.numel;

    return end > tail ? smaller(end - tail, p.numel) : 0;
}

static void step_adam(const fc_optim_param *params, size_t n_params, size_t block, fc_root root,
                      size_t fused_lanes)
{
    const size_t end = end_of(params, n_params, block);
    const fc_kern_table *kern = fc_kern();

    for (part p = first_part(params, n_params, block); p.numel > 0; p = next_part(p, end)) {
        kern->adam(&p.of->adam, root, p.of->param + p.start, p.of->grad + p.start,
                   from(p.of->state[0], p.start), from(p.of->state[1], p.start),
                   from(p.of->state[2], p.start), p.numel, tail_of(p, fused_lanes));
    }
}

static void step_adam_by(const fc_optim_param *params, size_t n_params, size_t block,
                         fc_roots_fn roots)
{
    alignas(FC_ALIGN) float squares[FC_OPTIM_BLOCK];
    const part first = first_part(params, n_params, block);
    const size_t end = end_of(params, n_params, block);
    size_t filled = 0;

    for (part p = first; p.numel > 0; p = next_part(p, end)) {
        fc_kern()->adam_moments(&p.of->adam, p.of->param + p.start, p.of->grad + p.start,
                                from(p.of->state[0], p.start), from(p.of->state[1], p.start),
                                from(p.of->state[2], p.start), squares + filled, p.numel);
        filled += p.numel;
    }
    roots(squares, filled);
    filled = 0;
    for (part p = first; p.numel > 0; p = next_part(p, end)) {
        fc_kern()->adam_update(&p.of->adam, p.of->param + p.start, from(p.of->state[0], p.start),
                               squares + filled, p.numel);
        filled += p.numel;
    }
}

static void step_sgd(const fc_optim_param *params, size_t n_params, size_t block, const fc_sgd *sgd,
                     size_t fused_lanes)
{
    const size_t end = end_of(params, n_params, block);
    const fc_kern_table *kern = fc_kern();

    for (part p = first_part(params, n_params, block); p.numel > 0; p = next_part(p, end)) {
        kern->sgd(sgd, p.of->param + p.start, p.of->grad + p.start, from(p.of->state[0], p.start),
                  p.numel, tail_of(p, fused_lanes));
    }
}

const char *fc_optim_key(const fc_optim_rule *rule, size_t i)
{
    static const char *const of_adam[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

    return rule->is_adam ? of_adam[i] : "momentum_buffer";
}

void fc_optim_step(const fc_optim_param *params, size_t n_params, size_t block,
                   const fc_optim_rule *rule)
{
    if (!rule->is_adam) {
        step_sgd(params, n_params, block, &rule->sgd, rule->fused_lanes);
    } else if (rule->root == FC_ROOT_COUNT) {
        step_adam_by(params, n_params, block, rule->roots);
    } else {
        step_adam(params, n_params, block, rule->root, rule->fused_lanes);
    }
}

/* Over `n_blocks` blocks of floats, from the one with these bits on. */
static bool agree(fc_roots_fn roots, fc_root root, uint32_t bits, uint32_t stride, int n_blocks)
{
    alignas(FC_ALIGN) float found[FC_OPTIM_BLOCK], wanted[FC_OPTIM_BLOCK];

    for (int block = 0; block < n_blocks; block++) {
        for (size_t i = 0; i < FC_OPTIM_BLOCK; i++, bits += stride) {
            memcpy(&found[i], &bits, sizeof(bits));
        }
        memcpy(wanted, found, sizeof(found));
        roots(wanted, FC_OPTIM_BLOCK);
        if (!fc_kern()->roots(root, found, FC_OPTIM_BLOCK) ||
            memcmp(found, wanted, sizeof(found)) != 0) {
            return false;
        }
    }
    return true;
}

/* For some numbers of every size, then for all between 1 and 4. A root of 4 x is twice that of x
 * where a library looks at no more than x's size. */
fc_root fc_optim_root_of(fc_roots_fn roots)
{
    fc_root root = FC_ROOT_NEAREST;

    while (root != FC_ROOT_COUNT &&
           !(agree(roots, root, 0, 32771, 8) && agree(roots, root, 0x3f800000, 1, 1024))) {
        root = (fc_root)(root + 1);
    }
    return root;
}
