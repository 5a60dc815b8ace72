/* `_C.NcclGroup`: NCCL for the ranks of one process group. */
#ifndef FC_BIND_COMM_NCCL_H
#define FC_BIND_COMM_NCCL_H

#include <Python.h>

#include "transport/nccl.h"

namespace fc {

/* Borrowed: valid while `object` lives. TypeError as an exception for anything but a
 * `_C.NcclGroup`. */
fc_nccl_group *nccl_from_object(PyObject *object);

} // namespace fc

#endif
