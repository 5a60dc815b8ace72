/* What tests of GPU kernels draw: sizes, types and values, the same in each run. */
#ifndef DRAWN_VALUES_H
#define DRAWN_VALUES_H

#include "check.h"

#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

static uint64_t state = 7;

static inline uint64_t draw(uint64_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % below;
}

static inline fc_dtype draw_float(void)
{
    static const fc_dtype types[] = {FC_F32, FC_F64, FC_BF16, FC_F16};

    return types[draw(4)];
}

/* Numbers around 1, of either sign. */
static inline void fill_numbers(char *at, fc_dtype type, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        double x = ((double)draw(4001) - 2000) / 997;

        if (type == FC_F64) {
            memcpy(at + i * 8, &x, 8);
        } else {
            fc_kern_cast(FC_F64, type)(at + i * fc_dtype_bytes(type), &x, 1);
        }
    }
}

static inline void *take(size_t bytes)
{
    void *memory = malloc(bytes == 0 ? 1 : bytes);

    CHECK_OR_EXIT(memory != NULL);
    return memory;
}

static inline size_t draw_numel(void)
{
    switch (draw(4)) {
    case 0:
        return 1 + draw(12);
    case 1:
        return 8 * (1 + draw(30));
    case 2:
        return 1 + draw(400);
    default:
        return 1 + draw(3000);
    }
}

#endif
