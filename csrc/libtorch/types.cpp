// Element types: the core's and torch's.
#include "libtorch/types.h"

#include <algorithm>
#include <array>

namespace fc {

namespace {

// By fc_dtype; RAW ones some of their size.
constexpr std::array<at::ScalarType, FC_DTYPE_COUNT> types = {
    at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,  at::kByte, at::kChar, at::kShort,
    at::kInt,   at::kLong,   at::kByte,     at::kShort, at::kInt,  at::kLong, at::kComplexDouble};

// Of the first `n`; as many as these: none is it.
int place_of(at::ScalarType type, int n)
{
    return static_cast<int>(std::find(types.begin(), types.begin() + n, type) - types.begin());
}

} // namespace

fc_dtype number_of(at::ScalarType type)
{
    return static_cast<fc_dtype>(place_of(type, FC_RAW1));
}

fc_dtype find_dtype(at::ScalarType type)
{
    if (const int place = place_of(type, FC_FLOAT_COUNT); place < FC_FLOAT_COUNT) {
        return static_cast<fc_dtype>(place);
    }
    for (const fc_dtype raw : {FC_RAW1, FC_RAW2, FC_RAW4, FC_RAW8, FC_RAW16}) {
        if (fc_dtype_bytes(raw) == c10::elementSize(type)) {
            return raw;
        }
    }
    return FC_DTYPE_COUNT;
}

at::ScalarType scalar_type_of(fc_dtype dtype)
{
    return types[dtype];
}

} // namespace fc
