/* What each thread of the GPU kernels does. Host and device: the tests run these thread by thread.
 *
 * A thread's work depends on its number, the number of threads and the arguments alone. Threads
 * share nothing, but for the sums of a warp, which the callers of fc_squares_tile and fc_slot_part
 * add up as fc_tree does. Sums are formed in float (double where an operand is float64) and rounded
 * once.
 */
#ifndef FC_KERNELS_CUDA_BODIES_H
#define FC_KERNELS_CUDA_BODIES_H

#include "kernels/cuda/tiles.h"
#include "kernels/cuda/vectors.h"
#include "kernels/kern_optim_scalar.h"

/* Vectors of a lane whose loads are in flight together; sums have two loads each. */
#define FC_DEPTH 4
#define FC_SUM_DEPTH 2

/* What is done with an element on its way. */
typedef struct fc_sum {
    double divisor; /* 1: nothing */
    bool accumulate;
} fc_sum;

/* ---- move and finish: dst = src, dst = (accumulate ? dst : 0) + src / divisor ---- */

FC_BOTH fc_vector fc_cast_vector(int from, int to, int k, fc_vector in)
{
    fc_vector out = {{0, 0, 0, 0}};

    FC_UNROLL
    for (int i = 0; i < k; i++) {
        if (from == FC_F64 || to == FC_F64) {
            fc_put_f64(to, &out, i, fc_get_f64(from, in, i));
        } else {
            fc_put_f32(to, &out, i, fc_get_f32(from, in, i));
        }
    }
    return out;
}

/* Without accumulate nothing is added to the quotient: -0 stays -0. */
FC_BOTH fc_vector fc_sum_vector(const fc_sum *sum, int from, int to, int k, fc_vector in,
                                fc_vector old)
{
    fc_vector out = {{0, 0, 0, 0}};

    FC_UNROLL
    for (int i = 0; i < k; i++) {
        if (from == FC_F64 || to == FC_F64) {
            double x = fc_get_f64(from, in, i);

            x = sum->divisor == 1 ? x : x / sum->divisor;
            fc_put_f64(to, &out, i, sum->accumulate ? fc_get_f64(to, old, i) + x : x);
        } else {
            float x = fc_get_f32(from, in, i);

            x = sum->divisor == 1 ? x : x / (float)sum->divisor;
            fc_put_f32(to, &out, i, sum->accumulate ? fc_get_f32(to, old, i) + x : x);
        }
    }
    return out;
}

/* Up to FC_DEPTH (`n`) vectors of k elements: all loads first, then all stores. A source of zeros
 * has no memory. `sum` is null where elements are only cast. */
FC_BOTH void fc_transfer(const fc_sum *sum, int from, int to, int k, const uint64_t *dst,
                         const uint64_t *src, bool is_zero, int n)
{
    const int in_bytes = k * fc_element_bytes(from), out_bytes = k * fc_element_bytes(to);
    const int depth = sum != NULL ? FC_SUM_DEPTH : FC_DEPTH;
    fc_vector in[FC_DEPTH], old[FC_DEPTH];

    FC_UNROLL
    for (int j = 0; j < depth; j++) {
        in[j] = old[j] = (fc_vector){{0, 0, 0, 0}};
        if (j < n && !is_zero) {
            in[j] = fc_load((const char *)(uintptr_t)src[j], in_bytes);
        }
        if (sum != NULL && j < n && sum->accumulate) {
            old[j] = fc_load((const char *)(uintptr_t)dst[j], out_bytes);
        }
    }
    FC_UNROLL
    for (int j = 0; j < depth; j++) {
        if (j < n) {
            fc_vector out = sum != NULL  ? fc_sum_vector(sum, from, to, k, in[j], old[j])
                            : from == to ? in[j]
                                         : fc_cast_vector(from, to, k, in[j]);

            fc_store((char *)(uintptr_t)dst[j], out, out_bytes);
        }
    }
}

/* Where a tile lies. */
typedef struct fc_place {
    const fc_run *run;
    uint64_t dst, src; /* of the line, or of the run if its lines are short */
    bool is_zero;
} fc_place;

FC_BOTH void fc_locate(const fc_place *place, uint32_t element, uint32_t dst_bytes,
                       uint32_t src_bytes, uint64_t *dst, uint64_t *src)
{
    *dst = place->dst;
    *src = place->src;
    if (place->run->tiles_per_line == 0) {
        const uint32_t line = fc_divide(element, place->run->by_line);

        element -= line * place->run->line_numel;
        *dst += fc_line_offset(place->run, line, 0);
        *src += fc_line_offset(place->run, line, 1);
    }
    *dst += (uint64_t)element * dst_bytes;
    *src += (uint64_t)element * src_bytes;
}

/* The tile's vectors (k > 1) or its edges (k = 1). */
FC_BOTH void fc_move_units(const fc_sum *sum, int from, int to, int k, const fc_place *place,
                           const fc_tile *tile, uint32_t lane)
{
    const uint32_t count = k > 1 ? tile->n_vectors : tile->n_edges;
    const uint32_t depth = sum != NULL ? FC_SUM_DEPTH : FC_DEPTH;

    for (uint32_t first = lane; first < count; first += FC_WARP * depth) {
        uint64_t dst[FC_DEPTH] = {0}, src[FC_DEPTH] = {0};
        int n = 0;

        FC_UNROLL
        for (uint32_t j = 0; j < depth; j++) {
            const uint32_t unit = first + FC_WARP * j;

            if (unit < count) {
                const uint32_t element =
                    k > 1 ? tile->body + unit * (uint32_t)k : fc_edge(tile, unit);

                fc_locate(place, element, (uint32_t)fc_element_bytes(to),
                          (uint32_t)fc_element_bytes(from), &dst[j], &src[j]);
                n++;
            }
        }
        fc_transfer(sum, from, to, k, dst, src, place->is_zero, n);
    }
}

/* Cuts the tile and moves `place` to its line. */
FC_BOTH fc_tile fc_place_tile(fc_place *place, uint32_t dst_bytes, uint32_t src_bytes,
                              uint32_t index)
{
    const fc_run *run = place->run;
    const uint32_t k = FC_VECTOR_BYTES / (dst_bytes > src_bytes ? dst_bytes : src_bytes);
    const uint64_t mask = FC_VECTOR_BYTES - 1;

    if (run->tiles_per_line != 0) {
        const uint32_t line = index / run->tiles_per_line;

        place->dst += fc_line_offset(run, line, 0);
        place->src += fc_line_offset(run, line, 1);
        return fc_cut_line(
            run, index - line * run->tiles_per_line, k,
            fc_lead(place->dst, dst_bytes, place->is_zero ? 0 : place->src, src_bytes, k));
    }
    return fc_cut_run(run, index, k,
                      run->is_regular && ((place->dst - run->at[0]) & mask) == 0 &&
                          (place->is_zero || ((place->src - run->at[1]) & mask) == 0));
}

#define FC_PAIR(from, to) ((from) << 4 | (to))
#define FC_PAIR_MAP(X)                                                                             \
    X(F32, F64)                                                                                    \
    X(F32, BF16)                                                                                   \
    X(F32, F16)                                                                                    \
    X(F64, F32)                                                                                    \
    X(F64, BF16)                                                                                   \
    X(F64, F16)                                                                                    \
    X(BF16, F32)                                                                                   \
    X(BF16, F64)                                                                                   \
    X(BF16, F16)                                                                                   \
    X(F16, F32)                                                                                    \
    X(F16, F64)                                                                                    \
    X(F16, BF16)
#define FC_SAME_MAP(X)                                                                             \
    X(F32, F32)                                                                                    \
    X(F64, F64)                                                                                    \
    X(BF16, BF16)                                                                                  \
    X(F16, F16)

/* A tile's vectors: the types of its run become constants. */
FC_BOTH void fc_move_vectors(const fc_sum *sum, const fc_place *place, const fc_tile *tile,
                             uint32_t lane)
{
    const int from = place->run->from, to = place->run->to;

#define FC_WIDER(a, b) (fc_element_bytes(a) > fc_element_bytes(b) ? (a) : (b))
#define FC_UNITS(a, b)                                                                             \
    fc_move_units(sum, a, b, FC_VECTOR_BYTES / fc_element_bytes(FC_WIDER(a, b)), place, tile, lane)
#define FC_CASE(a, b)                                                                              \
    case FC_PAIR(FC_##a, FC_##b):                                                                  \
        FC_UNITS(FC_##a, FC_##b);                                                                  \
        return;
    switch (FC_PAIR(from, to)) {
        FC_PAIR_MAP(FC_CASE)
    default:
        break;
    }
    if (sum != NULL) {
        switch (FC_PAIR(from, to)) {
            FC_SAME_MAP(FC_CASE)
        default: /* launches refuse other types */
            return;
        }
    }
#undef FC_CASE
    switch (fc_element_bytes(from)) { /* a copy, by size */
    case 1:
        FC_UNITS(FC_RAW1, FC_RAW1);
        break;
    case 2:
        FC_UNITS(FC_RAW2, FC_RAW2);
        break;
    case 4:
        FC_UNITS(FC_RAW4, FC_RAW4);
        break;
    default:
        FC_UNITS(FC_RAW8, FC_RAW8);
        break;
    }
#undef FC_UNITS
#undef FC_WIDER
}

/* All tiles of one thread; `sum` is null for the kernel that moves. */
FC_BOTH void fc_move_thread(const fc_table *table, const fc_bases *bases, const fc_sum *sum,
                            fc_thread thread)
{
    uint32_t at = 0;

    for (uint32_t tile = table->first_tile + thread.warp; tile < table->end_tile;
         tile += thread.n_warps) {
        fc_place place;
        fc_tile cut;

        at = fc_find_run(table, tile, at);
        place.run = &table->runs[at];
        place.dst = fc_operand(place.run, bases, 0);
        place.src = fc_operand(place.run, bases, 1);
        place.is_zero = place.src == 0;
        cut = fc_place_tile(&place, (uint32_t)fc_element_bytes(place.run->to),
                            (uint32_t)fc_element_bytes(place.run->from),
                            tile - place.run->first_tile);
        fc_move_vectors(sum, &place, &cut, thread.lane);
        /* Once for all types: edges are few, or the operands do not lie alike. */
        fc_move_units(sum, place.run->from, place.run->to, 1, &place, &cut, thread.lane);
    }
}

/* ---- flat runs ---- */

/* A tile of n operands of one type; all have to lie alike for vectors. */
FC_BOTH fc_tile fc_flat_tile(const fc_run *run, uint32_t index, const uint64_t *at, int n, int type)
{
    const uint32_t bytes = (uint32_t)fc_element_bytes(type);
    const uint32_t k = FC_VECTOR_BYTES / bytes;
    int lead = fc_lead(at[0], bytes, at[0], bytes, k);

    for (int i = 1; i < n; i++) {
        lead = fc_lead(at[i], bytes, at[i], bytes, k) == lead ? lead : -1;
    }
    return fc_cut_line(run, index, k, lead);
}

/* ---- sums of squares ---- */

/* One step of the tree that adds a warp's 32 numbers: lane i takes over lane i + distance. */
FC_BOTH double fc_tree(double *lanes)
{
    for (uint32_t distance = FC_WARP / 2; distance > 0; distance /= 2) {
        for (uint32_t i = 0; i < distance; i++) {
            lanes[i] += lanes[i + distance];
        }
    }
    return lanes[0];
}

FC_BOTH double fc_squares_units(int type, int k, uint64_t at, const fc_tile *tile, uint32_t lane)
{
    const uint32_t count = k > 1 ? tile->n_vectors : tile->n_edges;
    const uint32_t bytes = (uint32_t)fc_element_bytes(type);
    double wide = 0;
    float sum = 0;

    for (uint32_t unit = lane; unit < count; unit += FC_WARP) {
        const uint32_t element = k > 1 ? tile->body + unit * (uint32_t)k : fc_edge(tile, unit);
        const fc_vector v =
            fc_load((const char *)(uintptr_t)(at + (uint64_t)element * bytes), k * (int)bytes);

        FC_UNROLL
        for (int i = 0; i < k; i++) {
            if (type == FC_F64) {
                wide = fma(fc_get_f64(type, v, i), fc_get_f64(type, v, i), wide);
            } else {
                sum = fmaf(fc_get_f32(type, v, i), fc_get_f32(type, v, i), sum);
            }
        }
    }
    return type == FC_F64 ? wide : sum;
}

FC_BOTH double fc_squares_typed(int type, const fc_run *run, uint64_t at, uint32_t index,
                                uint32_t lane)
{
    const int k = FC_VECTOR_BYTES / fc_element_bytes(type);
    const fc_tile tile = fc_flat_tile(run, index, &at, 1, type);

    return fc_squares_units(type, k, at, &tile, lane) + fc_squares_units(type, 1, at, &tile, lane);
}

/* A lane's share of a tile. */
FC_BOTH double fc_squares_tile(const fc_run *run, const fc_bases *bases, uint32_t tile,
                               uint32_t lane)
{
    const uint64_t at = fc_operand(run, bases, 0);
    const uint32_t index = tile - run->first_tile;

    switch (run->from) {
    case FC_F32:
        return fc_squares_typed(FC_F32, run, at, index, lane);
    case FC_F64:
        return fc_squares_typed(FC_F64, run, at, index, lane);
    case FC_BF16:
        return fc_squares_typed(FC_BF16, run, at, index, lane);
    default:
        return fc_squares_typed(FC_F16, run, at, index, lane);
    }
}

/* A lane's share of a slot's tiles. */
FC_BOTH double fc_slot_part(fc_slot slot, const double *tiles, uint32_t lane)
{
    double sum = 0;

    for (uint32_t tile = slot.first_tile + lane; tile < slot.end_tile; tile += FC_WARP) {
        sum += tiles[tile];
    }
    return sum;
}

/* ---- Adam ---- */

enum {
    FC_PARAM,
    FC_GRAD,
    FC_EXP_AVG,
    FC_EXP_AVG_SQ
};

/* In the order of torch's foreach operators, fused multiply-adds where their kernels have them.
 * It differs from the order on CPUs: there torch multiplies the gradient twice, here it squares. */
FC_BOTH void fc_adam_one(const fc_adam *a, float *param, float grad, float *exp_avg,
                         float *exp_avg_sq)
{
    const float g = gradient_one(grad, a->is_maximized, *param, a->l2);
    const float m = lerp_one(*exp_avg, g, a->weight1);
    const float v = fmaf(a->weight2, g * g, *exp_avg_sq * a->beta2);
    const float denominator = sqrtf(v) / a->correction + a->eps;

    *exp_avg = m;
    *exp_avg_sq = v;
    *param = fmaf(a->step_size, m / denominator, *param * a->decay);
}

FC_BOTH void fc_adam_units(const fc_adam *a, int k, const uint64_t *at, const fc_tile *tile,
                           uint32_t lane)
{
    const uint32_t count = k > 1 ? tile->n_vectors : tile->n_edges;
    const int bytes = k * (int)sizeof(float);

    for (uint32_t unit = lane; unit < count; unit += FC_WARP) {
        const uint32_t element = k > 1 ? tile->body + unit * (uint32_t)k : fc_edge(tile, unit);
        fc_vector v[FC_RUN_OPERANDS];

        FC_UNROLL
        for (int i = 0; i < FC_RUN_OPERANDS; i++) {
            v[i] = fc_load((const char *)(uintptr_t)(at[i] + (uint64_t)element * sizeof(float)),
                           bytes);
        }
        FC_UNROLL
        for (int i = 0; i < k; i++) {
            float param = f32_of_bits(v[FC_PARAM].word[i]);
            float exp_avg = f32_of_bits(v[FC_EXP_AVG].word[i]);
            float exp_avg_sq = f32_of_bits(v[FC_EXP_AVG_SQ].word[i]);

            fc_adam_one(a, &param, f32_of_bits(v[FC_GRAD].word[i]), &exp_avg, &exp_avg_sq);
            v[FC_PARAM].word[i] = bits_of_f32(param);
            v[FC_EXP_AVG].word[i] = bits_of_f32(exp_avg);
            v[FC_EXP_AVG_SQ].word[i] = bits_of_f32(exp_avg_sq);
        }
        FC_UNROLL
        for (int i = 0; i < FC_RUN_OPERANDS; i++) {
            if (i != FC_GRAD) {
                fc_store((char *)(uintptr_t)(at[i] + (uint64_t)element * sizeof(float)), v[i],
                         bytes);
            }
        }
    }
}

FC_BOTH void fc_adam_thread(const fc_table *table, const fc_bases *bases, const fc_adam *a,
                            fc_thread thread)
{
    uint32_t known = 0;

    for (uint32_t tile = table->first_tile + thread.warp; tile < table->end_tile;
         tile += thread.n_warps) {
        uint64_t at[FC_RUN_OPERANDS];
        fc_tile cut;
        const fc_run *run;

        known = fc_find_run(table, tile, known);
        run = &table->runs[known];
        FC_UNROLL
        for (int i = 0; i < FC_RUN_OPERANDS; i++) {
            at[i] = fc_operand(run, bases, i);
        }
        cut = fc_flat_tile(run, tile - run->first_tile, at, FC_RUN_OPERANDS, FC_F32);
        fc_adam_units(a, FC_VECTOR_BYTES / (int)sizeof(float), at, &cut, thread.lane);
        fc_adam_units(a, 1, at, &cut, thread.lane);
    }
}

#endif
