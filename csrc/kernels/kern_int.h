/* Wrapping integer sums in plain C; each table compiles them with its own instruction set. */
#ifndef FC_KERNELS_KERN_INT_H
#define FC_KERNELS_KERN_INT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INT_BLOCK 256 /* elements summed at a time: they stay in the first-level cache */

/* The same for signed and unsigned, since two's complement sums wrap alike. */
#define DEFINE_REDUCE_INT(name, type)                                                              \
    static void name(void *dst, const void *const *srcs, size_t n_srcs, size_t numel,              \
                     double divisor, bool accumulate)                                              \
    {                                                                                              \
        type sum[INT_BLOCK];                                                                       \
        type term[INT_BLOCK];                                                                      \
                                                                                                   \
        (void)divisor;                                                                             \
        for (size_t start = 0; start < numel; start += INT_BLOCK) {                                \
            size_t n = numel - start < INT_BLOCK ? numel - start : INT_BLOCK;                      \
                                                                                                   \
            memset(sum, 0, sizeof(sum));                                                           \
            for (size_t s = 0; s < n_srcs + (accumulate ? 1 : 0); s++) {                           \
                const void *from = s < n_srcs ? srcs[s] : dst;                                     \
                                                                                                   \
                memcpy(term, (const char *)from + start * sizeof(type), n * sizeof(type));         \
                for (size_t k = 0; k < n; k++) {                                                   \
                    sum[k] = (type)(sum[k] + term[k]);                                             \
                }                                                                                  \
            }                                                                                      \
            memcpy((char *)dst + start * sizeof(type), sum, n * sizeof(type));                     \
        }                                                                                          \
    }

DEFINE_REDUCE_INT(reduce_int_1, uint8_t)
DEFINE_REDUCE_INT(reduce_int_2, uint16_t)
DEFINE_REDUCE_INT(reduce_int_4, uint32_t)
DEFINE_REDUCE_INT(reduce_int_8, uint64_t)

/* The initialiser of fc_kern_table.reduce_int. */
#define REDUCE_INT_TABLE                                                                           \
    {                                                                                              \
        [FC_U8] = reduce_int_1,  [FC_I8] = reduce_int_1,  [FC_I16] = reduce_int_2,                 \
        [FC_I32] = reduce_int_4, [FC_I64] = reduce_int_8,                                          \
    }

#endif
