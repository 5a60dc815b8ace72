/* `_C.Transport`: a transport of the core, made over callables of Python. */
#ifndef FC_BIND_COMM_TRANSPORT_H
#define FC_BIND_COMM_TRANSPORT_H

#include <Python.h>

#include "transport/transport.h"

#include <cstdint>
#include <vector>

/* Borrowed: valid while `object` lives, so whoever keeps the pointer keeps a reference to the
 * object. Raises TypeError and returns nullptr for anything but a `_C.Transport`. */
fc_transport *fc_transport_from_object(PyObject *object);

/* `n_ranks` ints of a sequence; false with a Python exception set. */
bool fc_read_ranks(PyObject *sequence, int n_ranks, std::vector<int> &out);

/* 0 for what is no time to wait: the core refuses it. */
int64_t fc_timeout_ns(double seconds);

int fc_register_transport(PyObject *module);

#endif
