/* The kernels with a conversion to BF16 of the CPU's own, on CPUs with AVX-512 that lack it: a
 * model of that instruction is in its place. */
#include "check.h"

#ifdef __x86_64__

#define fc_kern_table_avx512_bf16 table_with_model

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")
#include "kernels/kern_avx512_body.h"

/* Denormals are zeros of their sign; all else is rounded as the other kernels do. */
static __m256i modelled(__m512 x)
{
    const __m512 sign = _mm512_set1_ps(-0.0f);
    const __mmask16 is_denormal = _mm512_fpclass_ps_mask(x, 0x20);

    return bf16_bits(_mm512_mask_and_ps(x, is_denormal, x, sign));
}

#define _mm512_cvtneps_pbh modelled
#include "kernels/kern_avx512_bf16.c"
#pragma GCC pop_options

#include "kernel_values.h"

/* Enough to be written past the cache. */
#define NUMEL ((size_t)1 << 20)

/* Any bits, and every 16th number or so a denormal; then whole vectors with one denormal, in each
 * of their places. */
static void fill(float *x)
{
    for (size_t i = 0; i < NUMEL; i++) {
        const uint32_t bits = (uint32_t)random_bits();
        const size_t place = i / LANES % LANES;
        const bool is_denormal = i < NUMEL / 2 ? random_bits() % 16 == 0 : i % LANES == place;
        const float value = (float)ordinary();

        if (is_denormal) {
            const uint32_t denormal = bits & 0x807fffff;

            memcpy(&x[i], &denormal, sizeof(denormal));
        } else if (i < NUMEL / 2) {
            memcpy(&x[i], &bits, sizeof(bits));
        } else {
            x[i] = value;
        }
    }
}

static void check_alike(const uint16_t *wanted, const uint16_t *found, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        CHECK_MSG(found[i] == wanted[i], "element %zu of %zu: %#x, expected %#x", i, numel,
                  (unsigned)found[i], (unsigned)wanted[i]);
    }
}

int main(void)
{
    static float x[NUMEL];
    static uint16_t wanted[NUMEL];
    static uint16_t found[NUMEL];

    if (fc_kern_table_avx512() == NULL) {
        CHECK_SKIP("no AVX-512");
    }
    fill(x);
    fc_kern_table_ref()->cast[FC_F32][FC_BF16](wanted, x, NUMEL);
    table.cast[FC_F32][FC_BF16](found, x, NUMEL);
    check_alike(wanted, found, NUMEL);
    for (size_t n = 0; n < COUNT(numels); n++) {
        const float *from = x + NUMEL / 2;

        memset(found, 0xa5, sizeof(found));
        fc_kern_table_ref()->cast[FC_F32][FC_BF16](wanted, from, numels[n]);
        table.cast[FC_F32][FC_BF16](found, from, numels[n]);
        check_alike(wanted, found, numels[n]);
        CHECK(found[numels[n]] == 0xa5a5);
    }
    return check_result();
}

#else

int main(void)
{
    CHECK_SKIP("no x86");
}

#endif
