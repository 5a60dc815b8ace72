/* Register operations in AVX-512: sixteen floats at a time. store_bf16 is left to the including
 * file. */
#ifndef FC_KERNELS_KERN_AVX512_BODY_H
#define FC_KERNELS_KERN_AVX512_BODY_H

#include "kernels/kern_x86.h"

#include <stdint.h>
#include <string.h>

#define LANES 16
typedef __m512 vf;
typedef __m512d vd;

#define zero_f32 _mm512_setzero_ps
#define zero_f64 _mm512_setzero_pd
#define set_f32 _mm512_set1_ps
#define set_f64 _mm512_set1_pd
#define add_f32 _mm512_add_ps
#define add_f64 _mm512_add_pd
#define sqrt_f32 _mm512_sqrt_ps
#define HAS_ESTIMATED_ROOT true
#define sub_f32 _mm512_sub_ps
#define larger_f32(x, y)                                                                           \
    _mm512_mask_mov_ps(_mm512_max_ps(x, y), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x)
#define fma_f32 _mm512_fmadd_ps
#define mul_f32 _mm512_mul_ps
#define mul_f64 _mm512_mul_pd
#define div_f32 _mm512_div_ps
#define div_f64 _mm512_div_pd

static inline vf load_f32(const void *memory)
{
    return _mm512_loadu_ps(memory);
}

static inline vd load_f64(const void *memory)
{
    return _mm512_loadu_pd(memory);
}

static inline vf load_bf16(const void *memory)
{
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(memory));

    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline vf load_f16(const void *memory)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(memory));
}

/* One step of Newton's from an estimate; exact scaling aside, the same for x and 4 x. */
static inline vf once_refined_root(vf x)
{
    vf inverse = _mm512_rsqrt14_ps(x);
    vf root = mul_f32(x, inverse);
    vf rest = _mm512_fnmadd_ps(root, root, x);

    return fma_f32(rest, mul_f32(inverse, set_f32(0.5f)), root);
}

#define FPCLASS_OWN_ROOT (0x02 | 0x04 | 0x08) /* zeros and infinity */
#define FPCLASS_NO_ROOT (0x10 | 0x40)         /* negative numbers */
#define SMALL_ROOT_BITS ((127 - 60) << 23)    /* of 2^-60: below, `rest` may lose bits */
#define INFINITE_BITS (255 << 23)

/* Where one element is zero, small, infinite, negative or no number. */
static __attribute__((noinline)) vf unusual_root(vf x)
{
    __mmask16 is_small = _mm512_cmp_ps_mask(x, set_f32(0x1p-60f), _CMP_LT_OQ);
    vf root = once_refined_root(_mm512_mask_mul_ps(x, is_small, x, set_f32(0x1p64f)));
    vf none = set_f32(__builtin_nanf(""));

    root = _mm512_mask_mul_ps(root, is_small, root, set_f32(0x1p-32f));
    root = _mm512_mask_mov_ps(root, _mm512_fpclass_ps_mask(x, FPCLASS_OWN_ROOT), x);
    return _mm512_mask_mov_ps(root, _mm512_fpclass_ps_mask(x, FPCLASS_NO_ROOT), none);
}

static inline vf estimated_root(vf x)
{
    __m512i above = _mm512_sub_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(SMALL_ROOT_BITS));
    __m512i range = _mm512_set1_epi32(INFINITE_BITS - SMALL_ROOT_BITS);

    if (__builtin_expect(_mm512_cmplt_epu32_mask(above, range) != 0xffff, 0)) {
        return unusual_root(x);
    }
    return once_refined_root(x);
}

/* AVX-512 has estimates of its own. */
static inline vf sse_inverse_root(vf x)
{
    __m256 low = _mm256_rsqrt_ps(_mm512_castps512_ps256(x));
    __m256 high = _mm256_rsqrt_ps(_mm512_extractf32x8_ps(x, 1));

    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

static inline __mmask16 is_between(vf x, float least, float most)
{
    __mmask16 is_above = _mm512_cmp_ps_mask(x, set_f32(least), _CMP_GE_OQ);

    return _mm512_mask_cmp_ps_mask(is_above, x, set_f32(most), _CMP_LE_OQ);
}

static inline bool all_between(vf x, float least, float most)
{
    return is_between(x, least, most) == 0xffff;
}

static inline vf where_between(vf x, float least, float most, vf inside, vf outside)
{
    return _mm512_mask_mov_ps(outside, is_between(x, least, most), inside);
}

static inline void store_f32(void *memory, vf x, bool stream)
{
    if (stream) {
        _mm512_stream_ps(memory, x);
    } else {
        _mm512_storeu_ps(memory, x);
    }
}

static inline void store_f64(void *memory, vd x, bool stream)
{
    if (stream) {
        _mm512_stream_pd(memory, x);
    } else {
        _mm512_storeu_pd(memory, x);
    }
}

static inline void store_half(void *memory, __m256i x, bool stream)
{
    if (stream) {
        _mm256_stream_si256(memory, x);
    } else {
        _mm256_storeu_si256(memory, x);
    }
}

/* Rounds in integer arithmetic, which keeps denormals. */
static inline __m256i bf16_bits(vf x)
{
    __m512i bits = _mm512_castps_si512(x);
    __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i bias = _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff));
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i rounded = _mm512_add_epi32(bits, bias);
    __m512i quiet = _mm512_set1_epi32(0x00400000);
    __m512i top = _mm512_mask_or_epi32(rounded, is_nan, bits, quiet);

    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(top, 16));
}

static inline void store_f16(void *memory, vf x, bool stream)
{
    __mmask16 all = 0xffff;

    store_half(memory, _mm512_maskz_cvtps_ph(all, x, _MM_FROUND_TO_NEAREST_INT), stream);
}

static inline vd wide_f32(vf x, int half)
{
    return _mm512_cvtps_pd(half == 0 ? _mm512_castps512_ps256(x) : _mm512_extractf32x8_ps(x, 1));
}

static inline vf narrow_f32(vd lo, vd hi)
{
    __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps(lo));

    return _mm512_insertf32x8(low, _mm512_cvtpd_ps(hi), 1);
}

/* Towards zero, then odd where that is not `x`. */
static inline __m256 odd_half(vd x)
{
    __m256 cut = _mm512_cvt_roundpd_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    __mmask8 is_inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(cut), x, _CMP_NEQ_OQ);
    __m256i bits = _mm256_castps_si256(cut);

    bits = _mm256_mask_or_epi32(bits, is_inexact, bits, _mm256_set1_epi32(1));
    return _mm256_castsi256_ps(bits);
}

static inline vf narrow_odd_f32(vd lo, vd hi)
{
    return _mm512_insertf32x8(_mm512_castps256_ps512(odd_half(lo)), odd_half(hi), 1);
}

static void stream_bytes(char *dst, const char *src, size_t bytes)
{
    size_t ahead = (size_t)(-(uintptr_t)dst) % 64;

    memcpy(dst, src, ahead);
    for (; ahead + 256 <= bytes; ahead += 256) {
        for (size_t k = 0; k < 256; k += sizeof(vf)) {
            store_f32(dst + ahead + k, load_f32(src + ahead + k), true);
        }
    }
    stream_fence();
    memcpy(dst + ahead, src + ahead, bytes - ahead);
}

static inline bool cpu_has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           cpu_has_f16c();
}

#endif
