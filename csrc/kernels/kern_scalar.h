/* Conversions of one element between the floating types, in integer arithmetic where bits matter.
 *
 * Narrowing rounds to nearest even, keeps denormals, and turns a NaN into a quiet NaN with the same
 * sign and upper payload bits, which is what the x86 conversion instructions do.
 */
#ifndef FC_KERNELS_KERN_SCALAR_H
#define FC_KERNELS_KERN_SCALAR_H

#include "kernels/kern_both.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define F32_SIGN UINT32_C(0x80000000)
#define F32_INFINITY UINT32_C(0x7f800000)
#define F32_QUIET UINT32_C(0x00400000)

FC_BOTH uint32_t bits_of_f32(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

FC_BOTH float f32_of_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

FC_BOTH float f32_from_bf16(uint16_t half)
{
    return f32_of_bits((uint32_t)half << 16);
}

FC_BOTH uint16_t bf16_from_f32(float value)
{
    uint32_t bits = bits_of_f32(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t quiet = (bits | F32_QUIET) >> 16;

    return (uint16_t)((bits & ~F32_SIGN) > F32_INFINITY ? quiet : rounded);
}

FC_BOTH float f32_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t exponent = (half >> 10) & 0x1f;
    uint32_t mantissa = half & 0x3ff;
    uint32_t normal = ((exponent + 112) << 23) | (mantissa << 13);
    uint32_t special = F32_INFINITY | (mantissa << 13) | (mantissa != 0 ? F32_QUIET : 0);
    uint32_t denormal = bits_of_f32((float)(int32_t)mantissa * 0x1p-24f);

    return f32_of_bits(sign | (exponent == 0 ? denormal : exponent == 31 ? special : normal));
}

FC_BOTH uint16_t f16_from_f32(float value)
{
    uint32_t bits = bits_of_f32(value);
    uint32_t sign = (bits & F32_SIGN) >> 16;
    uint32_t size = bits & ~F32_SIGN;
    uint32_t normal = (size - (UINT32_C(112) << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    /* 0.5 has the last place of an f16 denormal (2^-24), so that this addition rounds to it. */
    uint32_t denormal = bits_of_f32(f32_of_bits(size) + 0.5f) - UINT32_C(0x3f000000);
    uint32_t quiet = 0x7e00 | ((size >> 13) & 0x3ff);
    uint32_t half = size < UINT32_C(0x38800000) ? denormal : normal; /* below 2^-14 */

    half = size >= UINT32_C(0x477ff000) ? 0x7c00 : half; /* 65520 and more round to infinity */
    return (uint16_t)(sign | (size > F32_INFINITY ? quiet : half));
}

/* Rounded to odd: what is rounded once more, to at most 22 bits, is then rounded as if once. */
FC_BOTH float f32_odd_from_f64(double value)
{
    float near = (float)value;
    uint32_t bits = bits_of_f32(near);

    if (isnan(value) || (double)near == value) {
        return near;
    }
    bits -= fabs((double)near) > fabs(value) ? 1 : 0;
    return f32_of_bits(bits | 1);
}

#endif
