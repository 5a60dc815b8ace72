/* What the x86 files share: 256-bit conversions of the short types, streaming stores, F16C
 * detection. */
#ifndef FC_KERNELS_KERN_X86_H
#define FC_KERNELS_KERN_X86_H

#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>

/* Eight floats, whatever the width of the other vectors. */
typedef __m256 v8;
#define zero_v8 _mm256_setzero_ps
#define load_v8 _mm256_loadu_ps
#define store_v8 _mm256_storeu_ps
#define add_v8 _mm256_add_ps
#define mul_v8 _mm256_mul_ps

#define CPUID_BF16 (1u << 5) /* leaf 7, subleaf 1, EAX */

/* Some compilers cannot ask for F16C by name; the caller has asked for AVX2 and the system's
 * support. */
static inline bool cpu_has_f16c(void)
{
    unsigned int a = 0;
    unsigned int b = 0;
    unsigned int c = 0;
    unsigned int d = 0;

    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

static inline void stream_fence(void)
{
    _mm_sfence(); /* streaming stores become visible in order with what follows */
}

#endif
