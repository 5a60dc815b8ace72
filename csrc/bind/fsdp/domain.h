// The Python object that owns an fc_domain: _C.Domain.
#ifndef FC_BIND_FSDP_DOMAIN_H
#define FC_BIND_FSDP_DOMAIN_H

#include <Python.h>

#include "bind/device/device.h"
#include "engine/domain.h"
#include "engine/slots.h"

namespace fc {

// Borrowed from the object; TypeError as an exception for anything else.
fc_domain *domain_of(PyObject *object);

// What the domain's units run on; null for units in shared memory or
// over messages.
Streams *domain_streams(PyObject *object);

// The pool of private memory for unsharded units, one for the process.
fc_slots *slots();

} // namespace fc

#endif
