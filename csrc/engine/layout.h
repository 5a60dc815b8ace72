/* Shard arithmetic of one unit: where every parameter lies in each buffer. Pure functions.
 *
 * Four buffers. The *unsharded buffer* holds the full parameters in the compute dtype, each at a
 * 64-byte aligned offset, its ranks' chunks next to each other along the shard dim. A *part* is
 * what one rank receives in a reduction: its chunk of every gradient in the reduce dtype (narrower
 * on the wire where that is exact), in a *section* per reduce dtype. The *gradient buffer* holds
 * the reduced chunks in the gradient dtype. A *pack* is a rank's chunks in the compute dtype, as
 * message transports carry them.
 *
 * [Note: aliased shards] A chunk of a parameter sharded on dim 0 is contiguous inside the full
 * parameter. Without a cast the shard therefore *is* a piece of the unsharded buffer: in shared
 * memory the all-gather moves no bytes. Other parameters are published: their owner writes its
 * chunk there.
 *
 * [Note: inputs] What is gathered of a parameter may be made by its owner, for each gather: its
 * shard has no memory, or *inputs* travel in its place, of which its owner then makes the whole
 * parameter. Inputs follow the parameters in their array, and have no gradient.
 */
#ifndef FC_ENGINE_LAYOUT_H
#define FC_ENGINE_LAYOUT_H

#include "base/dtype.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The type in which the gradients of one post travel: each parameter's reduce dtype, or for all of
 * them a narrower one, which float32 holds exactly. */
typedef enum fc_wire {
    FC_WIRE_REDUCE,
    FC_WIRE_BF16,
    FC_WIRE_F16
} fc_wire;

typedef struct fc_param {
    /* Given. The full tensor is [outer, rows, inner], contiguous, sharded along rows in chunks of
     * ceil(rows / n_ranks); outer is 1 for dim 0. */
    size_t outer, rows, inner;
    fc_dtype orig, compute, reduce, grad;
    bool is_complex; /* two elements are a number: `inner` is even, and numbers lie aligned */
    bool has_grad;   /* floating point: may receive a gradient */
    bool trainable;  /* at set-up; only orders the parts */
    /* Over messages: an element behind its chunk in a part counts the ranks that have a gradient.
     */
    bool is_counted;
    /* Over messages that others look at: chunks lie next to one another, and nothing travels but
     * them. Alike for all parameters of a unit. */
    bool is_packed;
    bool is_made;    /* see [Note: inputs]; never aliased */
    size_t n_inputs; /* in its place: that many of the unit's, in order; it is in no buffer */
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

/* Neighbours in a part that are reduced in one type. */
typedef struct fc_section {
    fc_dtype reduce;
    size_t at, bytes; /* in a part */
} fc_section;

typedef struct fc_layout {
    fc_param *params; /* borrowed from the unit */
    size_t n_params;
    size_t n_entries; /* with the inputs */
    int rank, n_ranks;
    size_t full_bytes; /* page multiple */
    size_t part_bytes; /* all parameters that may have a gradient */
    size_t trainable_part_bytes;
    size_t grad_bytes;
    size_t trainable_grad_bytes; /* of those that were trainable at set-up, which come first */
    size_t pack_bytes;
    fc_section sections[FC_FLOAT_COUNT]; /* of the trainable parts */
    size_t n_sections;
    fc_section frozen[FC_FLOAT_COUNT]; /* of the others, which follow */
    size_t n_frozen;
    bool may_narrow;      /* every gradient is reduced in float32 */
    bool is_uniform;      /* trainable parameters share their reduce and gradient dtypes */
    size_t mask_words;    /* 64 parameters a word */
    uint64_t fingerprint; /* equal on ranks with equal layouts; rank itself excluded */
} fc_layout;

/* Parameters and their inputs. */
size_t fc_layout_count(const fc_param *params, size_t n_params);
/* Whether an entry of the layout is gathered: not a parameter in whose place inputs are. */
static inline bool fc_layout_is_gathered(const fc_param *entry)
{
    return entry->n_inputs == 0;
}

/* See fc_param. */
static inline bool fc_layout_is_packed(const fc_layout *layout)
{
    return layout->n_params > 0 && layout->params[0].is_packed;
}

/* Fills in everything that is computed; aliasing is offered only if `may_alias`. `params` has the
 * inputs, too. */
FC_MUST_CHECK fc_status fc_layout_init(fc_layout *layout, fc_param *params, size_t n_params,
                                       int rank, int n_ranks, bool may_alias);

/* The section of a parameter that may have a gradient; NULL if nothing there has elements. */
const fc_section *fc_layout_section(const fc_layout *layout, const fc_param *param);

/* Rows of `rank` without padding. */
size_t fc_layout_rows(const fc_param *param, int rank, int n_ranks);

/* The wire for gradients that are all of type `grads`. */
fc_wire fc_layout_wire(const fc_layout *layout, fc_dtype grads);
/* A parameter's type on the wire, and where its chunk lies in a part: bytes. */
fc_dtype fc_wire_dtype(const fc_param *param, fc_wire wire);
size_t fc_wire_at(const fc_param *param, fc_wire wire);

/* The part of a divisor by which gradients are divided before they are added up. */
double fc_layout_pre_divisor(const fc_layout *layout, double divisor);

/* Mixes `value` into a fingerprint. */
uint64_t fc_fingerprint(uint64_t seed, uint64_t value);

#ifdef __cplusplus
}
#endif
#endif
