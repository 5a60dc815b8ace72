/* The AVX-512 kernels with the CPU's own conversion from F32 to BF16.
 *
 * That instruction rounds and quiets NaN as the reference does, but takes denormals for zero
 * whatever the control register says; vectors that hold one are rounded in integer arithmetic.
 */
#include "kernels/kern_avx512_body.h"

#define FPCLASS_DENORMAL 0x20

static inline void store_bf16(void *memory, vf x, bool stream)
{
    __m256i half = (__m256i)_mm512_cvtneps_pbh(x);

    if (__builtin_expect(_mm512_fpclass_ps_mask(x, FPCLASS_DENORMAL) != 0, 0)) {
        half = bf16_bits(x);
    }
    store_half(memory, half, stream);
}

#include "kernels/kern_vector.h"

static const fc_kern_table table = VECTOR_TABLE("avx512_bf16");

const fc_kern_table *fc_kern_table_avx512_bf16(void)
{
    unsigned int a = 0;
    unsigned int b = 0;
    unsigned int c = 0;
    unsigned int d = 0;

    if (!cpu_has_avx512() || __get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) {
        return NULL;
    }
    return (a & CPUID_BF16) != 0 ? &table : NULL;
}
