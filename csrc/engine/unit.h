/* What one unit does with its memory: publish, gather, stage, reduce.
 *
 * All functions work on plain memory and keep no state between calls. Threading: serialized per
 * domain.
 */
#ifndef FC_ENGINE_UNIT_H
#define FC_ENGINE_UNIT_H

#include "base/status.h"
#include "engine/domain.h"
#include "engine/exchange.h"
#include "engine/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

const fc_layout *fc_unit_layout(const fc_unit *unit);
const char *fc_unit_name(const fc_unit *unit);
fc_domain *fc_unit_domain(const fc_unit *unit);
/* Whom its reductions are for, see fc_reduction_attach; NULL at first. */
void *fc_unit_owner(const fc_unit *unit);

/* ---- parameters, mapped domains ---- */

/* The unsharded buffer as this rank reads it; a write to it stays private until it is discarded. */
void *fc_unit_view(const fc_unit *unit);
/* Where the chunk of an aliased parameter lives, with room for chunk_numel elements. */
void *fc_unit_shard_storage(const fc_unit *unit, size_t param);
/* Holds the domain's memory beyond the domain. */
fc_region *fc_unit_region(const fc_unit *unit);
/* Copies (and casts) this rank's chunks to where peers read them, one per entry of the layout; but
 * for those that are aliased. */
void fc_unit_publish(fc_unit *unit, const void *const *shards);
/* A private copy of the whole unsharded buffer. */
void fc_unit_copy_out(const fc_unit *unit, void *dst);
/* Takes back this rank's private writes to a parameter in the view. */
void fc_unit_discard_writes(fc_unit *unit, size_t param);

/* ---- parameters, message domains ---- */

/* Writes `shards` (one per entry of the layout, own_rows each) to this rank's pack. */
void fc_unit_pack(const fc_unit *unit, const void *const *shards, char *pack);
/* `bytes` of a rank's pack, from byte `at` on, into dst, laid out as the unsharded buffer. */
void fc_unit_unpack(const fc_unit *unit, int rank, size_t at, const char *data, size_t bytes,
                    void *dst);

/* ---- slices: of the unit in the domain of a smaller group ---- */

/* It is unpacked to where the whole unit has its parameters. */
void fc_unit_place_slices(fc_unit *sliced, const fc_unit *unit);
/* This rank's rows of an unsharded buffer, as its pack. */
void fc_unit_slice(const fc_unit *sliced, const void *full, char *pack);

/* ---- gradients ---- */

/* Whose parts are written. */
typedef enum fc_receivers {
    FC_TO_ALL,
    FC_TO_PEERS,
    FC_TO_SELF
} fc_receivers;

/* Casts a full gradient to the wire's type and writes the receivers' chunks into their parts. */
void fc_unit_stage(const fc_unit *unit, size_t param, const void *grad, fc_dtype dtype,
                   fc_wire wire, fc_receivers receivers, char *parts, size_t part_bytes);

/* Adds this rank to the count of a parameter that is counted; parts are zero there before. */
void fc_unit_count_present(const fc_unit *unit, size_t param, char *parts, int n_parts,
                           size_t part_bytes);
/* Adds to the mask which parameters any rank has counted, in a sum of `part_bytes`. */
void fc_unit_read_present(const fc_unit *unit, const char *part, size_t part_bytes, uint64_t *mask);

/* The bytes that a part needs to hold the parameters present in the post under construction. */
size_t fc_unit_part_bytes(const fc_unit *unit, fc_wire wire);
/* The same for a mask. */
size_t fc_unit_bytes_of(const fc_unit *unit, const uint64_t *mask, fc_wire wire);

/* dst = (accumulate ? dst : 0) + sum of the sources that hold `param`, divided. False if none does.
 * dst holds chunk_numel elements of type `dtype`; the sum is made in float32 or wider and, divided,
 * rounded to the reduce dtype. */
bool fc_unit_reduce(const fc_unit *unit, const fc_source *sources, int n_sources, size_t param,
                    void *dst, fc_dtype dtype, double divisor, bool accumulate);

/* The same for one rank without a detour: dst = (accumulate ? dst : 0) + grad / divisor, for a
 * gradient of the reduce dtype `from`. */
void fc_reduce_own(const void *grad, fc_dtype from, void *dst, fc_dtype dtype, size_t numel,
                   double divisor, bool accumulate);

/* All trainable parameters into a gradient buffer at once; false (nothing done) unless the layout
 * is uniform and every source holds exactly the trainable parameters. */
bool fc_unit_reduce_all(const fc_unit *unit, const fc_source *sources, int n_sources, void *grads,
                        double divisor);

#ifdef __cplusplus
}
#endif
#endif
