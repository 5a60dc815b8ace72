/* Shard arithmetic of one unit: where every parameter lies in each buffer. Pure functions.
 *
 * Four buffers. The *unsharded buffer* holds the full parameters in the compute dtype, each at a
 * 64-byte aligned offset, its ranks' chunks next to each other along the shard dim. A *part* is
 * what one rank receives in a reduction: its chunk of every gradient in the reduce dtype. The
 * *gradient buffer* holds the reduced chunks in the gradient dtype. A *pack* is a rank's chunks in
 * the compute dtype, as message transports carry them.
 *
 * [Note: aliased shards] A chunk of a parameter sharded on dim 0 is contiguous inside the full
 * parameter. Without a cast the shard therefore *is* a piece of the unsharded buffer: in shared
 * memory the all-gather moves no bytes. Other parameters are published: their owner writes its
 * chunk there.
 */
#ifndef FC_GROUP_LAYOUT_H
#define FC_GROUP_LAYOUT_H

#include "base/dtype.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_param {
    /* Given. The full tensor is [outer, rows, inner], contiguous, sharded along rows in chunks of
     * ceil(rows / n_ranks); outer is 1 for dim 0. */
    size_t outer, rows, inner;
    fc_dtype orig, compute, reduce, grad;
    bool has_grad;  /* floating point: may receive a gradient */
    bool trainable; /* at set-up; only orders the parts */
    /* Computed by fc_layout_init. */
    size_t chunk_rows;  /* of every rank, padding included */
    size_t own_rows;    /* of this rank, without padding */
    size_t chunk_numel; /* outer * chunk_rows * inner */
    bool is_aliased;
    size_t full_at; /* bytes, in the unsharded buffer */
    size_t part_at; /* bytes, in a part */
    size_t grad_at; /* bytes, in the gradient buffer */
    size_t pack_at; /* bytes, in a pack */
} fc_param;

typedef struct fc_layout {
    fc_param *params; /* borrowed from the unit */
    size_t n_params;
    int rank, n_ranks;
    size_t full_bytes; /* page multiple */
    size_t part_bytes; /* all parameters that may have a gradient */
    size_t trainable_part_bytes;
    size_t grad_bytes;
    size_t pack_bytes;
    bool is_uniform;      /* trainable parameters share their reduce and gradient dtypes */
    size_t mask_words;    /* 64 parameters a word */
    uint64_t fingerprint; /* equal on ranks with equal layouts; rank itself excluded */
} fc_layout;

/* Fills in everything that is computed; aliasing is offered only if `may_alias`. */
FC_MUST_CHECK fc_status fc_layout_init(fc_layout *layout, fc_param *params, size_t n_params,
                                       int rank, int n_ranks, bool may_alias);

/* Rows of `rank` without padding. */
size_t fc_layout_rows(const fc_param *param, int rank, int n_ranks);

/* Mixes `value` into a fingerprint. */
uint64_t fc_fingerprint(uint64_t seed, uint64_t value);

#ifdef __cplusplus
}
#endif
#endif
