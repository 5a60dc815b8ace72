/* The kernels in AVX-512 (F, BW, VL, DQ). */
#include "kernels/kern_avx512_body.h"

static inline void store_bf16(void *memory, vf x, bool stream)
{
    store_half(memory, bf16_bits(x), stream);
}

#include "kernels/kern_vector.h"

static const fc_kern_table table = VECTOR_TABLE("avx512");

const fc_kern_table *fc_kern_table_avx512(void)
{
    return cpu_has_avx512() ? &table : NULL;
}
