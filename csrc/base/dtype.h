/* Element types: one list for enum, name and size. */
#ifndef FC_BASE_DTYPE_H
#define FC_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, bytes, is real floating point). The four floating types come first: kernels index
 * their tables by them. RAW1..RAW16 are moved as bytes, never computed with. */
#define FC_DTYPE_MAP(X)                                                                            \
    X(F32, 4, true)                                                                                \
    X(F64, 8, true)                                                                                \
    X(BF16, 2, true)                                                                               \
    X(F16, 2, true)                                                                                \
    X(U8, 1, false)                                                                                \
    X(I8, 1, false)                                                                                \
    X(I16, 2, false)                                                                               \
    X(I32, 4, false)                                                                               \
    X(I64, 8, false)                                                                               \
    X(RAW1, 1, false)                                                                              \
    X(RAW2, 2, false)                                                                              \
    X(RAW4, 4, false)                                                                              \
    X(RAW8, 8, false)                                                                              \
    X(RAW16, 16, false)

typedef enum fc_dtype {
#define FC_DTYPE_ENUM(name, bytes, is_float) FC_##name,
    FC_DTYPE_MAP(FC_DTYPE_ENUM)
#undef FC_DTYPE_ENUM
    FC_DTYPE_COUNT
} fc_dtype;

#define FC_FLOAT_COUNT 4

size_t fc_dtype_bytes(fc_dtype dtype);
const char *fc_dtype_name(fc_dtype dtype);
bool fc_dtype_is_float(fc_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
