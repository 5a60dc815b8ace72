/* Up to 16 bytes of elements in registers: loads, stores, conversions. Host and device.
 *
 * `type` and `k` (elements) are constants where vectors are called for, so that one of the branches
 * is left. Little endian. On the host an access that a device would refuse (an address
 * that is no multiple of the width) ends the program.
 */
#ifndef FC_KERNELS_CUDA_VECTORS_H
#define FC_KERNELS_CUDA_VECTORS_H

#include "base/dtype.h"
#include "kernels/kern_both.h"
#include "kernels/kern_scalar.h"

#include <assert.h>
#include <stdint.h>
#include <string.h>

#define FC_WORDS 4

typedef struct fc_vector {
    uint32_t word[FC_WORDS];
} fc_vector;

FC_BOTH int fc_element_bytes(int type)
{
    return type == FC_F64 || type == FC_RAW8   ? 8
           : type == FC_F32 || type == FC_RAW4 ? 4
           : type == FC_RAW1                   ? 1
                                               : 2;
}

/* ---- memory ---- */

/* The instructions are written out, since nvcc stores a vector word by word otherwise. They are
 * volatile, so that they keep their order, and say nothing of memory to the compiler: what is known
 * of a run stays known over a store. */

/* `bytes`: 1, 2, 4, 8 or 16. */
FC_BOTH fc_vector fc_load(const char *at, int bytes)
{
    fc_vector v = {{0, 0, 0, 0}};

#ifdef __CUDA_ARCH__
    uint16_t half;

    if (bytes == 16) {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                     : "l"(at));
    } else if (bytes == 8) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(v.word[0]), "=r"(v.word[1])
                     : "l"(at));
    } else if (bytes == 4) {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(v.word[0]) : "l"(at));
    } else if (bytes == 2) {
        asm volatile("ld.global.u16 %0, [%1];" : "=h"(half) : "l"(at));
        v.word[0] = half;
    } else {
        asm volatile("ld.global.u8 %0, [%1];" : "=r"(v.word[0]) : "l"(at));
    }
#else
    assert((uintptr_t)at % (uintptr_t)bytes == 0);
    memcpy(v.word, at, (size_t)bytes);
#endif
    return v;
}

FC_BOTH void fc_store(char *at, fc_vector v, int bytes)
{
#ifdef __CUDA_ARCH__
    if (bytes == 16) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.word[0]),
                     "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]));
    } else if (bytes == 8) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(v.word[0]), "r"(v.word[1]));
    } else if (bytes == 4) {
        asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(v.word[0]));
    } else if (bytes == 2) {
        asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"((uint16_t)v.word[0]));
    } else {
        asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"(v.word[0]));
    }
#else
    assert((uintptr_t)at % (uintptr_t)bytes == 0);
    memcpy(at, v.word, (size_t)bytes);
#endif
}

/* One element, of up to 8 bytes, wherever it lies: packs of several types are bytes to others. */
FC_BOTH fc_vector fc_load_element(const char *at, int bytes)
{
    fc_vector v = {{0, 0, 0, 0}};

    if (((uintptr_t)at & (uintptr_t)(bytes - 1)) == 0) {
        return fc_load(at, bytes);
    }
    FC_UNROLL
    for (int i = 0; i < 8; i++) {
        if (i < bytes) {
            v.word[i / 4] |= fc_load(at + i, 1).word[0] << (8 * (i % 4));
        }
    }
    return v;
}

FC_BOTH void fc_store_element(char *at, fc_vector v, int bytes)
{
    if (((uintptr_t)at & (uintptr_t)(bytes - 1)) == 0) {
        fc_store(at, v, bytes);
        return;
    }
    FC_UNROLL
    for (int i = 0; i < 8; i++) {
        if (i < bytes) {
            fc_store(at + i, (fc_vector){{v.word[i / 4] >> (8 * (i % 4)), 0, 0, 0}}, 1);
        }
    }
}

/* ---- narrowing ---- */

/* As the plain kernels narrow, but that a device writes its own NaN. */
FC_BOTH uint32_t fc_narrow(int type, float value)
{
#ifdef __CUDA_ARCH__
    uint16_t half;

    if (type == FC_BF16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    }
    return half;
#else
    return type == FC_BF16 ? bf16_from_f32(value) : f16_from_f32(value);
#endif
}

FC_BOTH float fc_widen(int type, uint32_t half)
{
#ifdef __CUDA_ARCH__
    if (type == FC_F16) {
        float value;

        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)half));
        return value;
    }
    return f32_from_bf16((uint16_t)half);
#else
    return type == FC_BF16 ? f32_from_bf16((uint16_t)half) : f32_from_f16((uint16_t)half);
#endif
}

/* ---- elements of a vector ---- */

FC_BOTH float fc_get_f32(int type, fc_vector v, int i)
{
    if (type == FC_F32) {
        return f32_of_bits(v.word[i]);
    }
    return fc_widen(type, v.word[i / 2] >> (16 * (i % 2)) & 0xffff);
}

FC_BOTH double fc_get_f64(int type, fc_vector v, int i)
{
    if (type == FC_F64) {
        uint64_t bits = (uint64_t)v.word[2 * i + 1] << 32 | v.word[2 * i];
        double value;

        memcpy(&value, &bits, sizeof(value));
        return value;
    }
    return fc_get_f32(type, v, i);
}

/* Elements are put in order, into a vector that was zero. */
FC_BOTH void fc_put_f32(int type, fc_vector *v, int i, float value)
{
    if (type == FC_F32) {
        v->word[i] = bits_of_f32(value);
    } else {
        v->word[i / 2] |= fc_narrow(type, value) << (16 * (i % 2));
    }
}

FC_BOTH void fc_put_f64(int type, fc_vector *v, int i, double value)
{
    if (type == FC_F64) {
        uint64_t bits;

        memcpy(&bits, &value, sizeof(bits));
        v->word[2 * i] = (uint32_t)bits;
        v->word[2 * i + 1] = (uint32_t)(bits >> 32);
    } else {
        fc_put_f32(type, v, i, type == FC_F32 ? (float)value : f32_odd_from_f64(value));
    }
}

#endif
