/* The choice between gathers straight into the parameters and a copy-out.
 *
 * Direct gathers save a pass over the unsharded buffer and the slot. NCCL's developers advise them
 * where parameters do not differ much in size, and a fused copy otherwise
 * (github.com/pytorch/pytorch/issues/187239), without numbers: each all-gather of a group costs
 * some fixed work, and the largest decides when the group is done.
 */
#include "engine/gathers.h"

/* First guesses, which no GPU has confirmed; `make gpu-check` times both ways. */
#define MOST_PARAMS 32
#define MOST_SKEW 4     /* the largest over the mean */
#define DIRECT_ALIGN 16 /* what NCCL moves at once */

static size_t chunk_bytes(const fc_param *p)
{
    return p->chunk_numel * fc_dtype_bytes(p->compute);
}

/* For each gather, in memory that the gather does not keep. */
static bool is_made(const fc_param *p)
{
    return p->is_made || !fc_layout_is_gathered(p);
}

bool fc_gathers_fit(const fc_layout *layout)
{
    const size_t n_ranks = (size_t)layout->n_ranks;
    size_t i;

    for (i = 0; i < layout->n_params && n_ranks > 1; i++) {
        const fc_param *p = &layout->params[i];

        if (p->outer != 1 || p->rows % n_ranks != 0 || is_made(p)) {
            return false;
        }
    }
    return true;
}

const char *fc_gathers_why_staged(const fc_layout *layout, bool has_groups)
{
    size_t total = 0, largest = 0, i;

    if (layout->n_ranks == 1) { /* nothing to gather: the shards are cast into their place */
        return NULL;
    }
    if (!has_groups) {
        return "a process group gathers one buffer at a time";
    }
    for (i = 0; i < layout->n_params; i++) {
        if (is_made(&layout->params[i])) {
            return "what it gathers is made for each gather";
        }
    }
    if (!fc_gathers_fit(layout)) {
        return "a parameter is not sharded evenly on dim 0";
    }
    if (layout->n_params > MOST_PARAMS) {
        return "it has many parameters";
    }
    for (i = 0; i < layout->n_params; i++) {
        const size_t bytes = chunk_bytes(&layout->params[i]);

        if (bytes % DIRECT_ALIGN != 0) {
            return "a shard is no multiple of 16 bytes";
        }
        total += bytes;
        largest = bytes > largest ? bytes : largest;
    }
    return largest * layout->n_params > MOST_SKEW * total ? "its parameters differ much in size"
                                                          : NULL;
}
