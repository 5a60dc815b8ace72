/* What each thread of the GPU kernels does. Host and device: the tests run these thread by thread.
 *
 * A thread's work depends on its number and the arguments alone. Threads share nothing, but for the
 * sums of a warp or a block, which the callers of fc_squares_part and fc_slot_part add up as
 * fc_tree does. Sums are formed in float (double where an operand is float64) and rounded once.
 */
#ifndef FC_KERNELS_CUDA_BODIES_H
#define FC_KERNELS_CUDA_BODIES_H

#include "kernels/cuda/tiles.h"
#include "kernels/cuda/vectors.h"
#include "kernels/kern_optim_scalar.h"

/* Vectors of a lane whose loads are in flight together: as many as there are registers for, with 32
 * warps on a processor (24 that finish). Sums have two loads each; where lines are short each
 * vector has an address of its own. */
#define FC_DEPTH 8
#define FC_SUM_DEPTH 4
#define FC_WALK_DEPTH 2

/* Of a block that adds up the parts of a sum; the loads in flight of each thread. */
#define FC_SLOT_THREADS_MAX 1024
#define FC_SLOT_DEPTH 8

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

/* The first n of up to `depth` vectors of k elements: all loads first, then all stores. A source of
 * zeros has no memory. `sum` is null where elements are only cast. */
FC_BOTH void fc_transfer(const fc_sum *sum, int from, int to, int k, int depth, const uint64_t *dst,
                         const uint64_t *src, bool is_zero, uint32_t n)
{
    const int in_bytes = k * fc_element_bytes(from), out_bytes = k * fc_element_bytes(to);
    const bool is_anywhere = sum == NULL && k == 1; /* vectors and sums lie aligned */
    fc_vector in[FC_DEPTH], old[FC_DEPTH];

    FC_UNROLL
    for (int j = 0; j < depth; j++) {
        in[j] = old[j] = (fc_vector){{0, 0, 0, 0}};
        if ((uint32_t)j < n && !is_zero) {
            const char *at = (const char *)(uintptr_t)src[j];

            in[j] = is_anywhere ? fc_load_element(at, in_bytes) : fc_load(at, in_bytes);
        }
        if (sum != NULL && (uint32_t)j < n && sum->accumulate) {
            old[j] = fc_load((const char *)(uintptr_t)dst[j], out_bytes);
        }
    }
    FC_UNROLL
    for (int j = 0; j < depth; j++) {
        if ((uint32_t)j < n) {
            fc_vector out = sum != NULL  ? fc_sum_vector(sum, from, to, k, in[j], old[j])
                            : from == to ? in[j]
                                         : fc_cast_vector(from, to, k, in[j]);

            if (is_anywhere) {
                fc_store_element((char *)(uintptr_t)dst[j], out, out_bytes);
            } else {
                fc_store((char *)(uintptr_t)dst[j], out, out_bytes);
            }
        }
    }
}

/* Where a piece lies. */
typedef struct fc_place {
    const fc_run *run;
    fc_run head;       /* of it, read at once */
    uint64_t dst, src; /* of the line, or of the run if its lines are short */
    bool is_zero;
} fc_place;

/* How many of `depth` units are a lane's, where units are dealt out to a warp in turns. */
FC_BOTH uint32_t fc_units_of_lane(uint32_t first, uint32_t count, uint32_t depth)
{
    return fc_smaller((count - first + FC_WARP - 1) / FC_WARP, depth);
}

/* The vectors of a piece of a long line. */
FC_BOTH void fc_move_line(const fc_sum *sum, int from, int to, int k, const fc_place *place,
                          const fc_piece *piece, uint32_t lane)
{
    const uint32_t depth = sum != NULL ? FC_SUM_DEPTH : FC_DEPTH;
    const uint32_t in_bytes = (uint32_t)(k * fc_element_bytes(from));
    const uint32_t out_bytes = (uint32_t)(k * fc_element_bytes(to));
    uint64_t to_at =
        place->dst + (uint64_t)piece->body * (uint32_t)fc_element_bytes(to) + lane * out_bytes;
    uint64_t from_at =
        place->src + (uint64_t)piece->body * (uint32_t)fc_element_bytes(from) + lane * in_bytes;

    FC_UNROLL_BY(1)
    for (uint32_t first = lane; first < piece->n_vectors; first += FC_WARP * depth) {
        uint64_t dst[FC_DEPTH] = {0}, src[FC_DEPTH] = {0};

        FC_UNROLL
        for (uint32_t j = 0; j < depth; j++) {
            dst[j] = to_at + j * FC_WARP * out_bytes;
            src[j] = from_at + j * FC_WARP * in_bytes;
        }
        fc_transfer(sum, from, to, k, (int)depth, dst, src, place->is_zero,
                    fc_units_of_lane(first, piece->n_vectors, depth));
        to_at += FC_WARP * depth * out_bytes;
        from_at += FC_WARP * depth * in_bytes;
    }
}

FC_BOTH void fc_locate(const fc_place *place, const fc_run *run, uint32_t element,
                       uint32_t dst_bytes, uint32_t src_bytes, uint64_t *dst, uint64_t *src)
{
    *dst = place->dst;
    *src = place->src;
    if (run->tiles_per_line == 0) {
        const uint32_t line = fc_divide(element, run->by_line);

        element -= line * run->line_numel;
        *dst += fc_line_offset(run, line, 0);
        *src += fc_line_offset(run, line, 1);
    }
    *dst += (uint64_t)element * dst_bytes;
    *src += (uint64_t)element * src_bytes;
}

/* The vectors of a piece of short lines (k > 1), or the edges of any piece (k = 1). */
FC_BOTH void fc_move_units(const fc_sum *sum, int from, int to, int k, const fc_place *place,
                           const fc_piece *piece, uint32_t lane)
{
    const uint32_t count = k > 1 ? piece->n_vectors : piece->n_edges;
    const uint32_t depth = k > 1 ? FC_WALK_DEPTH : 1;
    const fc_run run = *place->run; /* what the loop needs of it, in registers */

    FC_UNROLL_BY(1)
    for (uint32_t first = lane; first < count; first += FC_WARP * depth) {
        uint64_t dst[FC_DEPTH] = {0}, src[FC_DEPTH] = {0};
        const uint32_t n = fc_units_of_lane(first, count, depth);

        FC_UNROLL
        for (uint32_t j = 0; j < depth; j++) {
            if (j < n) {
                const uint32_t unit = first + FC_WARP * j;
                const uint32_t element =
                    k > 1 ? piece->body + unit * (uint32_t)k : fc_edge(piece, unit);

                fc_locate(place, &run, element, (uint32_t)fc_element_bytes(to),
                          (uint32_t)fc_element_bytes(from), &dst[j], &src[j]);
            }
        }
        fc_transfer(sum, from, to, k, (int)depth, dst, src, place->is_zero, n);
    }
}

/* Cuts off what the tiles from `index` on, up to *n_tiles of them, have of one line, and moves
 * `place` to the line; *n_tiles becomes how many these are. */
FC_BOTH fc_piece fc_place_piece(fc_place *place, uint32_t dst_bytes, uint32_t src_bytes,
                                uint32_t index, uint32_t *n_tiles)
{
    const fc_run *head = &place->head;
    const uint32_t k = FC_VECTOR_BYTES / (dst_bytes > src_bytes ? dst_bytes : src_bytes);
    const uint64_t mask = FC_VECTOR_BYTES - 1;

    if (head->tiles_per_line != 0) {
        if (head->n_lines > 1) {
            const uint32_t line = fc_divide(index, place->run->by_tiles_per_line);

            place->dst += fc_line_offset(place->run, line, 0);
            place->src += fc_line_offset(place->run, line, 1);
            index -= line * head->tiles_per_line;
            *n_tiles = fc_smaller(*n_tiles, head->tiles_per_line - index);
        }
        return fc_cut_line(
            head, index, index + *n_tiles, k,
            fc_lead(place->dst, dst_bytes, place->is_zero ? 0 : place->src, src_bytes, k));
    }
    return fc_cut_run(head, index, index + *n_tiles, k,
                      head->is_regular && ((place->dst - head->at[0]) & mask) == 0 &&
                          (place->is_zero || ((place->src - head->at[1]) & mask) == 0));
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

FC_BOTH void fc_move_typed(const fc_sum *sum, int from, int to, const fc_place *place,
                           const fc_piece *piece, uint32_t lane)
{
    const int k =
        FC_VECTOR_BYTES / (fc_element_bytes(from) > fc_element_bytes(to) ? fc_element_bytes(from)
                                                                         : fc_element_bytes(to));

    if (place->head.tiles_per_line != 0) {
        fc_move_line(sum, from, to, k, place, piece, lane);
    } else {
        fc_move_units(sum, from, to, k, place, piece, lane);
    }
}

/* A piece's vectors: the types of its run become constants. */
FC_BOTH void fc_move_vectors(const fc_sum *sum, const fc_place *place, const fc_piece *piece,
                             uint32_t lane)
{
    const int from = place->head.from, to = place->head.to;

#define FC_CASE(a, b)                                                                              \
    case FC_PAIR(FC_##a, FC_##b):                                                                  \
        fc_move_typed(sum, FC_##a, FC_##b, place, piece, lane);                                    \
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
        fc_move_typed(sum, FC_RAW1, FC_RAW1, place, piece, lane);
        break;
    case 2:
        fc_move_typed(sum, FC_RAW2, FC_RAW2, place, piece, lane);
        break;
    case 4:
        fc_move_typed(sum, FC_RAW4, FC_RAW4, place, piece, lane);
        break;
    default:
        fc_move_typed(sum, FC_RAW8, FC_RAW8, place, piece, lane);
        break;
    }
}

/* What lies in one run of a stretch begins at `stretch`; that goes on behind it. */
FC_BOTH void fc_move_piece(const fc_bases *bases, const fc_sum *sum, fc_stretch *stretch,
                           uint32_t lane)
{
    fc_place place;
    fc_piece piece;
    uint32_t n;

    place.run = stretch->run;
    place.head = fc_read_run(stretch->run);
    place.dst = fc_operand(&place.head, bases, 0);
    place.src = fc_operand(&place.head, bases, 1);
    place.is_zero = place.src == 0;
    n = fc_smaller(stretch->end_tile, place.head.end_tile) - stretch->tile;
    piece = fc_place_piece(&place, (uint32_t)fc_element_bytes(place.head.to),
                           (uint32_t)fc_element_bytes(place.head.from),
                           stretch->tile - place.head.first_tile, &n);
    /* Once for all types: edges are few, or the operands do not lie alike. First, while few
     * registers are taken. */
    if (piece.n_edges != 0) {
        fc_move_units(sum, place.run->from, place.run->to, 1, &place, &piece, lane);
    }
    fc_move_vectors(sum, &place, &piece, lane);
    fc_advance(stretch, n);
}

/* All of one thread; `sum` is null for the kernel that moves. */
FC_BOTH void fc_move_thread(const fc_table *table, const fc_bases *bases, const fc_sum *sum,
                            fc_thread thread)
{
    if (thread.stretch < table->end_stretch) {
        fc_stretch stretch = fc_stretch_at(table, thread.stretch);

        while (stretch.tile < stretch.end_tile) {
            fc_move_piece(bases, sum, &stretch, thread.lane);
        }
    }
}

/* ---- flat runs ---- */

/* Tiles of n operands of one type; all have to lie alike for vectors. */
FC_BOTH fc_piece fc_flat_piece(const fc_run *run, uint32_t first, uint32_t end, const uint64_t *at,
                               int n, int type)
{
    const uint32_t bytes = (uint32_t)fc_element_bytes(type);
    const uint32_t k = FC_VECTOR_BYTES / bytes;
    int lead = fc_lead(at[0], bytes, at[0], bytes, k);

    for (int i = 1; i < n; i++) {
        lead = fc_lead(at[i], bytes, at[i], bytes, k) == lead ? lead : -1;
    }
    return fc_cut_line(run, first, end, k, lead);
}

/* ---- sums of squares ---- */

/* The tree that adds a warp's 32 numbers: the i-th takes over the i + distance-th. */
FC_BOTH double fc_tree(double *lanes)
{
    for (uint32_t distance = FC_WARP / 2; distance > 0; distance /= 2) {
        for (uint32_t i = 0; i < distance; i++) {
            lanes[i] += lanes[i + distance];
        }
    }
    return lanes[0];
}

FC_BOTH double fc_squares_vector(int type, int k, fc_vector v, float *sum)
{
    double wide = 0;

    FC_UNROLL
    for (int i = 0; i < k; i++) {
        if (type == FC_F64) {
            wide = fma(fc_get_f64(type, v, i), fc_get_f64(type, v, i), wide);
        } else {
            *sum = fmaf(fc_get_f32(type, v, i), fc_get_f32(type, v, i), *sum);
        }
    }
    return wide;
}

/* A lane's share of a piece's vectors (k > 1) or edges. FC_DEPTH vectors are added up in float. */
FC_BOTH double fc_squares_units(int type, int k, uint64_t at, const fc_piece *piece, uint32_t lane)
{
    const uint32_t count = k > 1 ? piece->n_vectors : piece->n_edges;
    const uint32_t depth = k > 1 ? FC_DEPTH : 1;
    const uint32_t bytes = (uint32_t)fc_element_bytes(type), unit_bytes = bytes * (uint32_t)k;
    double all = 0;

    FC_UNROLL_BY(1)
    for (uint32_t first = lane; first < count; first += FC_WARP * depth) {
        const uint32_t element = k > 1 ? piece->body + first * (uint32_t)k : fc_edge(piece, first);
        const uint64_t from = at + (uint64_t)element * bytes;
        fc_vector v[FC_DEPTH];
        float sum = 0;

        FC_UNROLL
        for (uint32_t j = 0; j < depth; j++) {
            v[j] = (fc_vector){{0, 0, 0, 0}};
            if (first + FC_WARP * j < count) {
                v[j] = fc_load((const char *)(uintptr_t)(from + FC_WARP * j * unit_bytes),
                               (int)unit_bytes);
            }
        }
        FC_UNROLL
        for (uint32_t j = 0; j < depth; j++) {
            all += fc_squares_vector(type, k, v[j], &sum);
        }
        all += sum;
    }
    return all;
}

FC_BOTH double fc_squares_typed(int type, const fc_run *run, uint64_t at, uint32_t first,
                                uint32_t end, uint32_t lane)
{
    const int k = FC_VECTOR_BYTES / fc_element_bytes(type);
    const fc_piece piece = fc_flat_piece(run, first, end, &at, 1, type);
    double sum = fc_squares_units(type, k, at, &piece, lane);

    if (piece.n_edges != 0) {
        sum += fc_squares_units(type, 1, at, &piece, lane);
    }
    return sum;
}

/* A lane's share of the tiles from `first` to `end` of a run. */
FC_BOTH double fc_squares_run(const fc_run *run, const fc_bases *bases, uint32_t first,
                              uint32_t end, uint32_t lane)
{
    const uint64_t at = fc_operand(run, bases, 0);

    switch (run->from) {
    case FC_F32:
        return fc_squares_typed(FC_F32, run, at, first, end, lane);
    case FC_F64:
        return fc_squares_typed(FC_F64, run, at, first, end, lane);
    case FC_BF16:
        return fc_squares_typed(FC_BF16, run, at, first, end, lane);
    default:
        return fc_squares_typed(FC_F16, run, at, first, end, lane);
    }
}

/* A lane's share of what a stretch has of one slot; `stretch` goes on behind it. */
FC_BOTH double fc_squares_part(const fc_bases *bases, fc_stretch *stretch, uint32_t lane)
{
    const uint32_t slot = stretch->run->slot;
    double sum = 0;

    do {
        const fc_run run = fc_read_run(stretch->run);
        const uint32_t n = fc_smaller(stretch->end_tile, run.end_tile) - stretch->tile;
        const uint32_t first = stretch->tile - run.first_tile;

        sum += fc_squares_run(&run, bases, first, first + n, lane);
        fc_advance(stretch, n);
    } while (stretch->tile < stretch->end_tile && stretch->run->slot == slot);
    return sum;
}

/* Where the sum of a stretch's part of a slot is kept. */
FC_BOTH uint32_t fc_part_at(uint32_t slot, uint32_t stretch)
{
    return slot + stretch; /* from part to part the one or the other grows, or both */
}

/* The stretches that a slot has parts of. */
FC_BOTH uint32_t fc_slot_begin(fc_slot slot, uint32_t stretch_tiles)
{
    return slot.first_tile / stretch_tiles;
}

FC_BOTH uint32_t fc_slot_end(fc_slot slot, uint32_t stretch_tiles)
{
    return slot.first_tile == slot.end_tile ? slot.first_tile / stretch_tiles
                                            : (slot.end_tile - 1) / stretch_tiles + 1;
}

/* How many threads add up the parts of a slot: for the largest one, some parts for each. */
static inline uint32_t fc_slot_threads(const fc_runs *plan)
{
    uint32_t threads = FC_WARP;

    for (size_t i = 0; i < plan->n_slots; i++) {
        const uint32_t n = fc_slot_end(plan->slots[i], plan->stretch_tiles) -
                           fc_slot_begin(plan->slots[i], plan->stretch_tiles);

        while (threads < FC_SLOT_THREADS_MAX && threads * FC_SLOT_DEPTH < n) {
            threads *= 2;
        }
    }
    return threads;
}

/* A thread's share of the parts of slot `number`, where n_threads take them in turns. */
FC_BOTH double fc_slot_part(fc_slot slot, uint32_t number, uint32_t stretch_tiles,
                            const double *parts, uint32_t thread, uint32_t n_threads)
{
    const uint32_t end = fc_slot_end(slot, stretch_tiles);
    double sum = 0;

    FC_UNROLL_BY(FC_SLOT_DEPTH)
    for (uint32_t i = fc_slot_begin(slot, stretch_tiles) + thread; i < end; i += n_threads) {
        sum += parts[fc_part_at(number, i)];
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

FC_BOTH void fc_adam_units(const fc_adam *a, int k, const uint64_t *at, const fc_piece *piece,
                           uint32_t lane)
{
    const uint32_t count = k > 1 ? piece->n_vectors : piece->n_edges;
    const int bytes = k * (int)sizeof(float);

    for (uint32_t unit = lane; unit < count; unit += FC_WARP) {
        const uint32_t element = k > 1 ? piece->body + unit * (uint32_t)k : fc_edge(piece, unit);
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

FC_BOTH void fc_adam_run(const fc_bases *bases, const fc_adam *a, fc_stretch *stretch,
                         uint32_t lane)
{
    const fc_run run = fc_read_run(stretch->run);
    const uint32_t n = fc_smaller(stretch->end_tile, run.end_tile) - stretch->tile;
    const uint32_t first = stretch->tile - run.first_tile;
    uint64_t at[FC_RUN_OPERANDS];
    fc_piece piece;

    FC_UNROLL
    for (int i = 0; i < FC_RUN_OPERANDS; i++) {
        at[i] = fc_operand(&run, bases, i);
    }
    piece = fc_flat_piece(&run, first, first + n, at, FC_RUN_OPERANDS, FC_F32);
    fc_adam_units(a, FC_VECTOR_BYTES / (int)sizeof(float), at, &piece, lane);
    if (piece.n_edges != 0) {
        fc_adam_units(a, 1, at, &piece, lane);
    }
    fc_advance(stretch, n);
}

FC_BOTH void fc_adam_thread(const fc_table *table, const fc_bases *bases, const fc_adam *a,
                            fc_thread thread)
{
    if (thread.stretch < table->end_stretch) {
        fc_stretch stretch = fc_stretch_at(table, thread.stretch);

        while (stretch.tile < stretch.end_tile) {
            fc_adam_run(bases, a, &stretch, thread.lane);
        }
    }
}

#endif
