// Element types: the core's and torch's.
#ifndef FC_LIBTORCH_TYPES_H
#define FC_LIBTORCH_TYPES_H

#include "base/dtype.h"

#include <c10/core/ScalarType.h>

namespace fc {

// The element type, RAW of its size for those without arithmetic; FC_DTYPE_COUNT: none is it.
fc_dtype find_dtype(at::ScalarType type);

// The type in which elements are added up; FC_RAW1: they cannot be.
fc_dtype number_of(at::ScalarType type);

// A type of that kind and size: the way back, except that RAW comes back as some type of its size.
at::ScalarType scalar_type_of(fc_dtype dtype);

} // namespace fc

#endif
