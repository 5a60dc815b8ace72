/* Numbers for tests of kernels: random, special, and how many at once. */
#ifndef FC_TESTS_KERNEL_VALUES_H
#define FC_TESTS_KERNEL_VALUES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define MAX_NUMEL 4097

static const size_t numels[] = {0, 1, 7, 15, 16, 17, 31, 33, 63, 64, 65, 1000, MAX_NUMEL};

static inline uint64_t random_bits(void)
{
    static uint64_t state = 0x9e3779b97f4a7c15u;

    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static const double specials[] = {
    0.0,
    -0.0,
    INFINITY,
    -INFINITY,
    NAN,
    -NAN,
    0x1p-149,
    -0x1p-149,
    0x1.8p-127,
    0x1p-126,
    0x1p-133,
    0x1p-24,
    -0x1p-24,
    0x1.8p-24,
    0x1p-25,
    0x1.000002p-25,
    0x1p-14,
    0x1.ffcp-15,
    65504,
    65519.996,
    65520,
    -65536,
    0x1.fffffep127,
    0x1.fep127,
    0x1.fefffep127,
    0x1.01p0,
    0x1.03p0,
    0x1.010002p0,
    0x1.002p0,
    0x1.006p0,
    0x1p-1074,
    0x1.fffffffffffffp1023,
    -0x1p128,
    1.0,
    -1.0,
};

/* A value that rounds: exponents close together, all mantissa bits in use. */
static inline double ordinary(void)
{
    return ldexp((double)(int64_t)random_bits(), -63 + (int)(random_bits() % 4));
}

#endif
