/* The kernels in AVX2, FMA and F16C: eight floats at a time. */
#include "kernels/kern_x86.h"

#include <stdint.h>
#include <string.h>

#define LANES 8
typedef __m256 vf;
typedef __m256d vd;

#define zero_f32 _mm256_setzero_ps
#define zero_f64 _mm256_setzero_pd
#define set_f32 _mm256_set1_ps
#define set_f64 _mm256_set1_pd
#define add_f32 _mm256_add_ps
#define add_f64 _mm256_add_pd
#define sqrt_f32 _mm256_sqrt_ps
#define HAS_ESTIMATED_ROOT false
#define estimated_root sqrt_f32
#define sse_inverse_root _mm256_rsqrt_ps
#define sub_f32 _mm256_sub_ps
#define larger_f32(x, y) _mm256_blendv_ps(_mm256_max_ps(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q))
#define fma_f32 _mm256_fmadd_ps
#define mul_f32 _mm256_mul_ps
#define mul_f64 _mm256_mul_pd
#define div_f32 _mm256_div_ps
#define div_f64 _mm256_div_pd

static inline vf load_f32(const void *memory)
{
    return _mm256_loadu_ps(memory);
}

static inline vd load_f64(const void *memory)
{
    return _mm256_loadu_pd(memory);
}

static inline vf load_bf16(const void *memory)
{
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(memory));

    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

static inline vf load_f16(const void *memory)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(memory));
}

static inline vf is_between(vf x, float least, float most)
{
    vf is_above = _mm256_cmp_ps(x, set_f32(least), _CMP_GE_OQ);

    return _mm256_and_ps(is_above, _mm256_cmp_ps(x, set_f32(most), _CMP_LE_OQ));
}

static inline bool all_between(vf x, float least, float most)
{
    return _mm256_movemask_ps(is_between(x, least, most)) == 0xff;
}

static inline vf where_between(vf x, float least, float most, vf inside, vf outside)
{
    return _mm256_blendv_ps(outside, inside, is_between(x, least, most));
}

static inline void store_f32(void *memory, vf x, bool stream)
{
    if (stream) {
        _mm256_stream_ps(memory, x);
    } else {
        _mm256_storeu_ps(memory, x);
    }
}

static inline void store_f64(void *memory, vd x, bool stream)
{
    if (stream) {
        _mm256_stream_pd(memory, x);
    } else {
        _mm256_storeu_pd(memory, x);
    }
}

static inline void store_half(void *memory, __m128i x, bool stream)
{
    if (stream) {
        _mm_stream_si128(memory, x);
    } else {
        _mm_storeu_si128(memory, x);
    }
}

static inline void store_bf16(void *memory, vf x, bool stream)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i bias = _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    vf is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    vf rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, bias));
    __m256i top =
        _mm256_castps_si256(_mm256_blendv_ps(rounded, _mm256_castsi256_ps(quiet), is_nan));

    top = _mm256_srli_epi32(top, 16);
    store_half(memory,
               _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1)),
               stream);
}

static inline void store_f16(void *memory, vf x, bool stream)
{
    store_half(memory, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), stream);
}

static inline vd wide_f32(vf x, int half)
{
    return _mm256_cvtps_pd(half == 0 ? _mm256_castps256_ps128(x) : _mm256_extractf128_ps(x, 1));
}

static inline vf narrow_f32(vd lo, vd hi)
{
    return _mm256_set_m128(_mm256_cvtpd_ps(hi), _mm256_cvtpd_ps(lo));
}

/* The low halves of four 64-bit masks. */
static inline __m128i short_mask(vd mask)
{
    __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    __m256i bits = _mm256_permutevar8x32_epi32(_mm256_castpd_si256(mask), even);

    return _mm256_castsi256_si128(bits);
}

/* One step back where the nearest float is beyond `x`, then odd where it is not `x`. */
static inline __m128 odd_half(vd x)
{
    __m128 near = _mm256_cvtpd_ps(x);
    vd back = _mm256_cvtps_pd(near);
    vd sign = _mm256_set1_pd(-0.0);
    vd size = _mm256_andnot_pd(sign, x);
    __m128i is_beyond = short_mask(_mm256_cmp_pd(_mm256_andnot_pd(sign, back), size, _CMP_GT_OQ));
    __m128i is_inexact = short_mask(_mm256_cmp_pd(back, x, _CMP_NEQ_OQ));
    __m128i bits = _mm_add_epi32(_mm_castps_si128(near), is_beyond); /* a true mask is -1 */

    return _mm_castsi128_ps(_mm_or_si128(bits, _mm_and_si128(is_inexact, _mm_set1_epi32(1))));
}

static inline vf narrow_odd_f32(vd lo, vd hi)
{
    return _mm256_set_m128(odd_half(hi), odd_half(lo));
}

static void stream_bytes(char *dst, const char *src, size_t bytes)
{
    size_t ahead = (size_t)(-(uintptr_t)dst) % 64;

    memcpy(dst, src, ahead);
    for (; ahead + 128 <= bytes; ahead += 128) {
        for (size_t k = 0; k < 128; k += sizeof(vf)) {
            store_f32(dst + ahead + k, load_f32(src + ahead + k), true);
        }
    }
    stream_fence();
    memcpy(dst + ahead, src + ahead, bytes - ahead);
}

#include "kernels/kern_vector.h"

static const fc_kern_table table = VECTOR_TABLE("avx2");

const fc_kern_table *fc_kern_table_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c()
               ? &table
               : NULL;
}
