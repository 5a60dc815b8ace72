/* Tables of the element types. */
#include "base/dtype.h"

#include <assert.h>

static const struct {
    size_t bytes;
    const char *name;
    bool is_float;
} table[FC_DTYPE_COUNT] = {
#define FC_DTYPE_ROW(name, bytes, is_float) {bytes, #name, is_float},
    FC_DTYPE_MAP(FC_DTYPE_ROW)
#undef FC_DTYPE_ROW
};

static_assert(FC_F16 + 1 == FC_FLOAT_COUNT, "the floating types come first");

size_t fc_dtype_bytes(fc_dtype dtype)
{
    return table[dtype].bytes;
}

const char *fc_dtype_name(fc_dtype dtype)
{
    return table[dtype].name;
}

bool fc_dtype_is_float(fc_dtype dtype)
{
    return table[dtype].is_float;
}
