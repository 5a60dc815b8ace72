/* The vector kernels, written once over a small set of register operations.
 *
 * A file that includes this first defines, for its instruction set:
 *   LANES            floats in a vector
 *   vf, vd           vector of floats, vector of doubles (LANES / 2)
 *   wide_f32(v, half), narrow_f32(lo, hi), narrow_odd_f32(lo, hi)   between vf and two vd
 *   load_<type>, store_<type>(memory, vector, stream)   for f32, bf16, f16 (vf) and f64 (vd)
 *   zero_, add_, mul_, div_, set_ with suffix f32 and f64
 *   stream_bytes(dst, src, bytes)   copy past the cache, both sides of any alignment
 *
 * Every operation is inlined with constant types, so that a kernel is one loop without branches on
 * them. Division by a power of two is a multiplication by its exact reciprocal, which rounds alike.
 */
#ifndef FC_KERNELS_KERN_VECTOR_H
#define FC_KERNELS_KERN_VECTOR_H

#include "kernels/kern_int.h"
#include "kernels/kern_tables.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#define UNROLL 4
#define STEP (UNROLL * LANES)
#define STREAM_ALIGN 64

/* Destinations of at least so many bytes are written past the cache. Measured with two processes at
 * once and buffers not in the cache (a Xeon with 2 MiB of second-level cache): 30% faster copies,
 * 50% faster sums of two. With buffers that do fit, equal from 2 MiB on; a CPU with 32 MiB of
 * third-level cache lost up to half of its speed at 1 MiB and won as much at 8 MiB. */
#define STREAM_BYTES ((size_t)4 << 20)

/* The same for casts and sums. What they write, gradients and shards, is not read again soon. */
#define STREAM_SUM_BYTES ((size_t)1 << 20)

/* A running sum of LANES elements: one vector of floats, or two of doubles. */
typedef struct lanes {
    vf f;
    vd lo;
    vd hi;
} lanes;

typedef struct finish {
    enum {
        AS_IS,
        MULTIPLY,
        DIVIDE
    } scale;
    bool accumulate;
    vf by_f;
    vd by_d;
} finish;

INLINE size_t bytes_of(fc_dtype type)
{
    return type == FC_F64 ? 8 : type == FC_F32 ? 4 : 2;
}

INLINE bool is_wide(fc_dtype from, fc_dtype to)
{
    return from == FC_F64 || to == FC_F64;
}

INLINE lanes load(fc_dtype type, bool wide, const void *memory)
{
    lanes x = {zero_f32(), zero_f64(), zero_f64()};

    if (type == FC_F64) {
        x.lo = load_f64(memory);
        x.hi = load_f64((const char *)memory + LANES / 2 * sizeof(double));
        return x;
    }
    x.f = type == FC_F32    ? load_f32(memory)
          : type == FC_BF16 ? load_bf16(memory)
                            : load_f16(memory);
    if (wide) {
        x.lo = wide_f32(x.f, 0);
        x.hi = wide_f32(x.f, 1);
    }
    return x;
}

INLINE void store(fc_dtype type, bool wide, void *memory, lanes x, bool stream)
{
    if (type == FC_F64) {
        store_f64(memory, x.lo, stream);
        store_f64((char *)memory + LANES / 2 * sizeof(double), x.hi, stream);
        return;
    }
    if (wide) { /* a second rounding follows unless the result is F32 */
        x.f = type == FC_F32 ? narrow_f32(x.lo, x.hi) : narrow_odd_f32(x.lo, x.hi);
    }
    if (type == FC_F32) {
        store_f32(memory, x.f, stream);
    } else if (type == FC_BF16) {
        store_bf16(memory, x.f, stream);
    } else {
        store_f16(memory, x.f, stream);
    }
}

INLINE lanes add(bool wide, lanes a, lanes b)
{
    if (wide) {
        a.lo = add_f64(a.lo, b.lo);
        a.hi = add_f64(a.hi, b.hi);
    } else {
        a.f = add_f32(a.f, b.f);
    }
    return a;
}

INLINE lanes scale(bool wide, lanes x, const finish *end)
{
    if (end->scale == MULTIPLY) {
        x.f = wide ? x.f : mul_f32(x.f, end->by_f);
        x.lo = wide ? mul_f64(x.lo, end->by_d) : x.lo;
        x.hi = wide ? mul_f64(x.hi, end->by_d) : x.hi;
    } else if (end->scale == DIVIDE) {
        x.f = wide ? x.f : div_f32(x.f, end->by_f);
        x.lo = wide ? div_f64(x.lo, end->by_d) : x.lo;
        x.hi = wide ? div_f64(x.hi, end->by_d) : x.hi;
    }
    return x;
}

static finish plan_finish(bool wide, double divisor, bool accumulate)
{
    finish end = {AS_IS, accumulate, set_f32(1.0f), set_f64(1.0)};
    int exponent = 0;
    bool is_power = frexp(divisor, &exponent) == 0.5;
    int limit = wide ? 1000 : 120; /* keeps the reciprocal a normal number */

    if (divisor == 1) {
        return end;
    }
    end.scale = is_power && exponent > -limit && exponent < limit ? MULTIPLY : DIVIDE;
    divisor = end.scale == MULTIPLY ? 1 / divisor : divisor;
    end.by_f = set_f32((float)divisor);
    end.by_d = set_f64(divisor);
    return end;
}

/* How many elements lie before the first aligned one; `numel` where none is, or streaming is off.
 */
INLINE size_t elements_to_alignment(const void *dst, size_t bytes, size_t numel)
{
    size_t ahead = (size_t)(-(uintptr_t)dst) % STREAM_ALIGN;

    return numel >= STREAM_SUM_BYTES / bytes && ahead % bytes == 0 ? ahead / bytes : numel;
}

/* ---- Cast ---- */

INLINE void cast_step(fc_dtype from, fc_dtype to, char *dst, const char *src, bool stream)
{
    bool wide = is_wide(from, to);

    for (size_t k = 0; k < STEP; k += LANES) {
        lanes x = load(from, wide, src + k * bytes_of(from));

        store(to, wide, dst + k * bytes_of(to), x, stream);
    }
}

/* Fewer than LANES elements, by way of whole vectors on the stack. */
INLINE void cast_rest(fc_dtype from, fc_dtype to, char *dst, const char *src, size_t numel)
{
    char in[LANES * sizeof(double)] = {0};
    char out[LANES * sizeof(double)];

    memcpy(in, src, numel * bytes_of(from));
    store(to, is_wide(from, to), out, load(from, is_wide(from, to), in), false);
    memcpy(dst, out, numel * bytes_of(to));
}

INLINE void cast_few(fc_dtype from, fc_dtype to, char *dst, const char *src, size_t numel)
{
    bool wide = is_wide(from, to);
    size_t i = 0;

    for (; i + LANES <= numel; i += LANES) {
        store(to, wide, dst + i * bytes_of(to), load(from, wide, src + i * bytes_of(from)), false);
    }
    if (i < numel) {
        cast_rest(from, to, dst + i * bytes_of(to), src + i * bytes_of(from), numel - i);
    }
}

INLINE void cast(fc_dtype from, fc_dtype to, char *dst, const char *src, size_t numel)
{
    size_t from_bytes = bytes_of(from);
    size_t to_bytes = bytes_of(to);
    size_t i = elements_to_alignment(dst, to_bytes, numel);

    if (i < numel) {
        cast_few(from, to, dst, src, i);
        for (; i + STEP <= numel; i += STEP) {
            cast_step(from, to, dst + i * to_bytes, src + i * from_bytes, true);
        }
        stream_fence();
    } else {
        for (i = 0; i + STEP <= numel; i += STEP) {
            cast_step(from, to, dst + i * to_bytes, src + i * from_bytes, false);
        }
    }
    cast_few(from, to, dst + i * to_bytes, src + i * from_bytes, numel - i);
}

/* ---- Reduce ---- */

INLINE void reduce_vectors(fc_dtype from, fc_dtype to, char *dst, const void *const *srcs,
                           size_t n_srcs, size_t start, size_t n_vectors, const finish *end,
                           bool stream)
{
    bool wide = is_wide(from, to);
    lanes sum[UNROLL];

    for (size_t v = 0; v < n_vectors; v++) {
        size_t at = (start + v * LANES) * bytes_of(from);

        sum[v] = load(from, wide, (const char *)srcs[0] + at);
    }
    for (size_t s = 1; s < n_srcs; s++) {
        for (size_t v = 0; v < n_vectors; v++) {
            size_t at = (start + v * LANES) * bytes_of(from);

            sum[v] = add(wide, sum[v], load(from, wide, (const char *)srcs[s] + at));
        }
    }
    for (size_t v = 0; v < n_vectors; v++) {
        char *to_memory = dst + (start + v * LANES) * bytes_of(to);

        sum[v] = scale(wide, sum[v], end);
        if (end->accumulate) {
            sum[v] = add(wide, load(to, wide, to_memory), sum[v]);
        }
        store(to, wide, to_memory, sum[v], stream);
    }
}

/* Fewer than LANES elements, by way of whole vectors on the stack. */
INLINE void reduce_rest(fc_dtype from, fc_dtype to, char *dst, const void *const *srcs,
                        size_t n_srcs, size_t start, size_t numel, const finish *end)
{
    bool wide = is_wide(from, to);
    char in[LANES * sizeof(double)] = {0};
    char out[LANES * sizeof(double)] = {0};
    lanes sum;

    dst += start * bytes_of(to);
    memcpy(in, (const char *)srcs[0] + start * bytes_of(from), numel * bytes_of(from));
    sum = load(from, wide, in);
    for (size_t s = 1; s < n_srcs; s++) {
        memcpy(in, (const char *)srcs[s] + start * bytes_of(from), numel * bytes_of(from));
        sum = add(wide, sum, load(from, wide, in));
    }
    sum = scale(wide, sum, end);
    if (end->accumulate) {
        memcpy(out, dst, numel * bytes_of(to));
        sum = add(wide, load(to, wide, out), sum);
    }
    store(to, wide, out, sum, false);
    memcpy(dst, out, numel * bytes_of(to));
}

INLINE void reduce_few(fc_dtype from, fc_dtype to, char *dst, const void *const *srcs,
                       size_t n_srcs, size_t start, size_t stop, const finish *end)
{
    for (; start + LANES <= stop; start += LANES) {
        reduce_vectors(from, to, dst, srcs, n_srcs, start, 1, end, false);
    }
    if (start < stop) {
        reduce_rest(from, to, dst, srcs, n_srcs, start, stop - start, end);
    }
}

INLINE void reduce(fc_dtype from, fc_dtype to, void *dst, const void *const *srcs, size_t n_srcs,
                   size_t numel, double divisor, bool accumulate)
{
    const finish end = plan_finish(is_wide(from, to), divisor, accumulate);
    size_t i = elements_to_alignment(dst, bytes_of(to), numel);

    if (i < numel && !accumulate) { /* an accumulating sum has read its destination anyway */
        reduce_few(from, to, dst, srcs, n_srcs, 0, i, &end);
        for (; i + STEP <= numel; i += STEP) {
            reduce_vectors(from, to, dst, srcs, n_srcs, i, UNROLL, &end, true);
        }
        stream_fence();
    } else {
        for (i = 0; i + STEP <= numel; i += STEP) {
            reduce_vectors(from, to, dst, srcs, n_srcs, i, UNROLL, &end, false);
        }
    }
    reduce_few(from, to, dst, srcs, n_srcs, i, numel, &end);
}

/* ---- The table ---- */

static void copy(void *dst, const void *src, size_t bytes)
{
    if (bytes >= STREAM_BYTES) {
        stream_bytes(dst, src, bytes);
    } else if (bytes != 0) { /* empty ranges may come as null pointers */
        memcpy(dst, src, bytes);
    }
}

/* Below this the fixed cost of a fence and the odd ends counts. */
#define AWAY_BYTES ((size_t)64 << 10)

static void copy_away(void *dst, const void *src, size_t bytes)
{
    if (bytes >= AWAY_BYTES) {
        stream_bytes(dst, src, bytes);
    } else {
        copy(dst, src, bytes);
    }
}

#include "kernels/kern_optim_vector.h"

#define DEFINE_REDUCE(from, to)                                                                    \
    static void reduce_##from##_##to(void *dst, const void *const *srcs, size_t n_srcs,            \
                                     size_t numel, double divisor, bool accumulate)                \
    {                                                                                              \
        reduce(FC_##from, FC_##to, dst, srcs, n_srcs, numel, divisor, accumulate);                 \
    }

#define DEFINE_PAIR(from, to)                                                                      \
    static void cast_##from##_##to(void *dst, const void *src, size_t numel)                       \
    {                                                                                              \
        cast(FC_##from, FC_##to, dst, src, numel);                                                 \
    }                                                                                              \
    DEFINE_REDUCE(from, to)

#define DEFINE_SAME(type)                                                                          \
    static void cast_##type##_##type(void *dst, const void *src, size_t numel)                     \
    {                                                                                              \
        copy(dst, src, numel * bytes_of(FC_##type));                                               \
    }                                                                                              \
    DEFINE_REDUCE(type, type)

DEFINE_SAME(F32)
DEFINE_SAME(F64)
DEFINE_SAME(BF16)
DEFINE_SAME(F16)
DEFINE_PAIR(F32, F64)
DEFINE_PAIR(F32, BF16)
DEFINE_PAIR(F32, F16)
DEFINE_PAIR(F64, F32)
DEFINE_PAIR(F64, BF16)
DEFINE_PAIR(F64, F16)
DEFINE_PAIR(BF16, F32)
DEFINE_PAIR(BF16, F64)
DEFINE_PAIR(BF16, F16)
DEFINE_PAIR(F16, F32)
DEFINE_PAIR(F16, F64)
DEFINE_PAIR(F16, BF16)

#define ROW(op, from)                                                                              \
    {                                                                                              \
        [FC_F32] = op##_##from##_F32,                                                              \
        [FC_F64] = op##_##from##_F64,                                                              \
        [FC_BF16] = op##_##from##_BF16,                                                            \
        [FC_F16] = op##_##from##_F16,                                                              \
    }

#define VECTOR_TABLE(table_name)                                                                   \
    {                                                                                              \
        .name = (table_name),                                                                      \
        .copy = copy,                                                                              \
        .copy_away = copy_away,                                                                    \
        .cast = {[FC_F32] = ROW(cast, F32),                                                        \
                 [FC_F64] = ROW(cast, F64),                                                        \
                 [FC_BF16] = ROW(cast, BF16),                                                      \
                 [FC_F16] = ROW(cast, F16)},                                                       \
        .reduce = {[FC_F32] = ROW(reduce, F32),                                                    \
                   [FC_F64] = ROW(reduce, F64),                                                    \
                   [FC_BF16] = ROW(reduce, BF16),                                                  \
                   [FC_F16] = ROW(reduce, F16)},                                                   \
        .reduce_int = REDUCE_INT_TABLE,                                                            \
        .adam_moments = adam_moments,                                                              \
        .adam_update = adam_update,                                                                \
        .adam = adam,                                                                              \
        .roots = roots,                                                                            \
        .sgd = sgd,                                                                                \
        .norms = norms,                                                                            \
        .multiply = multiply,                                                                      \
    }

#endif
