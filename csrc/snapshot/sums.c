/* Rows in two vectors of AVX2 where the CPU has it, which is as fast as copying alone, or in plain
 * C.
 */
#include "snapshot/sums.h"

#include <stdbool.h>
#include <string.h>

static void add_rows_plain(fc_sums *sums, char *dst, const char *src, size_t n)
{
    *sums = (fc_sums){0};
    for (size_t row = 0; row < n; row++) {
        uint64_t x[FC_SUM_LANES];

        memcpy(x, src + row * FC_SUM_ROW, sizeof(x));
        for (int lane = 0; lane < FC_SUM_LANES; lane++) {
            sums->plain[lane] += x[lane];
            sums->weighted[lane] += sums->plain[lane];
        }
        if (dst != NULL) {
            memcpy(dst + row * FC_SUM_ROW, x, sizeof(x));
        }
    }
}

#ifdef __x86_64__
#include <immintrin.h>

#define VECTORS 2
#define AHEAD 4096 /* bytes: the hardware's own prefetching ends with a page */
#define AVX2 __attribute__((target("avx2")))

typedef __m256i vector;

AVX2 static inline void add_rows(fc_sums *sums, char *dst, const char *src, size_t n)
{
    vector plain[VECTORS], weighted[VECTORS];

    for (int v = 0; v < VECTORS; v++) {
        plain[v] = weighted[v] = _mm256_setzero_si256();
    }
    for (size_t row = 0; row < n; row++, src += FC_SUM_ROW) {
        _mm_prefetch(src + AHEAD, _MM_HINT_T1);
        for (int v = 0; v < VECTORS; v++) {
            const vector x = _mm256_loadu_si256((const vector *)(const void *)src + v);

            plain[v] = _mm256_add_epi64(plain[v], x);
            weighted[v] = _mm256_add_epi64(weighted[v], plain[v]);
            if (dst != NULL) {
                _mm256_stream_si256((vector *)(void *)dst + v, x);
            }
        }
        dst = dst == NULL ? NULL : dst + FC_SUM_ROW;
    }
    for (int v = 0; v < VECTORS; v++) {
        _mm256_storeu_si256((vector *)(void *)sums->plain + v, plain[v]);
        _mm256_storeu_si256((vector *)(void *)sums->weighted + v, weighted[v]);
    }
    _mm_sfence();
}

/* Two loops, so that neither asks in every row. */
AVX2 static void add_rows_avx2(fc_sums *sums, char *dst, const char *src, size_t n)
{
    if (dst == NULL) {
        add_rows(sums, NULL, src, n);
    } else {
        add_rows(sums, dst, src, n);
    }
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") != 0;
}

#else
#define add_rows_avx2 add_rows_plain

static bool has_avx2(void)
{
    return false;
}
#endif

/* `n` rows, behind which there are `n_behind`. */
static void add(fc_sums *sums, char *dst, const char *src, size_t n, size_t n_behind)
{
    fc_sums part;

    (has_avx2() ? add_rows_avx2 : add_rows_plain)(&part, dst, src, n);
    for (int lane = 0; lane < FC_SUM_LANES; lane++) {
        sums->plain[lane] += part.plain[lane];
        sums->weighted[lane] += part.weighted[lane] + n_behind * part.plain[lane];
    }
}

void fc_sums_copy(fc_sums *sums, void *dst, const void *src, size_t bytes, size_t first,
                  size_t n_rows)
{
    const size_t n = bytes / FC_SUM_ROW, rest = bytes % FC_SUM_ROW;

    add(sums, dst, src, n, n_rows - first - n);
    if (rest > 0) {
        char last[FC_SUM_ROW] = {0};

        memcpy(last, (const char *)src + n * FC_SUM_ROW, rest);
        add(sums, dst == NULL ? NULL : (char *)dst + n * FC_SUM_ROW, last, 1,
            n_rows - first - n - 1);
    }
}

uint64_t fc_sums_mixed(const fc_sums *sums)
{
    uint64_t mixed = UINT64_C(0x9e3779b97f4a7c15);

    for (int lane = 0; lane < FC_SUM_LANES; lane++) {
        mixed = (mixed ^ sums->plain[lane]) * UINT64_C(0xff51afd7ed558ccd);
        mixed ^= mixed >> 32;
        mixed = (mixed ^ sums->weighted[lane]) * UINT64_C(0xc4ceb9fe1a85ec53);
        mixed ^= mixed >> 29;
    }
    return mixed | 1;
}
