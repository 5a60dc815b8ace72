/* A unit's layout as plans for GPU kernels: pack, unpack, stage and finish. Pure functions.
 *
 * They move what fc_unit_pack, unpack, stage and reduce move on the CPU, for all parameters of a
 * unit and all ranks at once. A plan's size does not depend on the number of ranks.
 */
#ifndef FC_ENGINE_LAYOUT_RUNS_H
#define FC_ENGINE_LAYOUT_RUNS_H

#include "base/status.h"
#include "engine/layout.h"
#include "kernels/cuda/runs.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The bases of the plans. */
typedef enum fc_layout_base {
    FC_BASE_WIRE,  /* what a collective reads or writes: one pack, n_ranks packs, section after
                    * section n_ranks times, or one part */
    FC_BASE_UNIT,  /* the unsharded buffer, or the gradient buffer */
    FC_BASE_ZEROS, /* its address is 0: what is moved from there is zeros */
    FC_BASE_PARAMS /* and this + i: the shard of the layout's entry i, or its full gradient */
} fc_layout_base;

/* Zeros behind this rank's chunk of a parameter in a pack, where others look at what travels. */
FC_MUST_CHECK fc_status fc_layout_plan_padding(const fc_param *param, fc_runs *plan);
/* Shards, own_rows each, cast into this rank's pack. Padding is as in fc_layout_plan_stage. */
FC_MUST_CHECK fc_status fc_layout_plan_pack(const fc_layout *layout, fc_runs *plan);
/* The packs of all ranks, one after the other, into the unsharded buffer. */
FC_MUST_CHECK fc_status fc_layout_plan_unpack(const fc_layout *layout, fc_runs *plan);
/* Full gradients of the types `grads` (one per parameter) into what is reduced: after each other
 * the sections, each of them for rank after rank; of the parameters that were trainable at set-up.
 * Padding is left as it is, but for zeros where others look at what travels. */
FC_MUST_CHECK fc_status fc_layout_plan_stage(const fc_layout *layout, const fc_dtype *grads,
                                             fc_wire wire, fc_runs *plan);
/* This rank's reduced part into the gradient buffer. */
FC_MUST_CHECK fc_status fc_layout_plan_finish(const fc_layout *layout, fc_wire wire, fc_runs *plan);

#ifdef __cplusplus
}
#endif
#endif
