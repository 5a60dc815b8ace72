/* What a transport asks of the Python process it lives in: exchange, the GIL, signals, stderr. */
#ifndef FC_BIND_PYTHON_CALLBACKS_H
#define FC_BIND_PYTHON_CALLBACKS_H

#include <Python.h>

#include "transport/transport.h"

struct fc_host {
    PyObject *exchange; /* owned: exchange(what: str, mine: bytes) -> list[bytes] */
    int n_ranks;
};

/* The operations over `host`, which outlives their use. */
fc_host_ops fc_host_get_ops(fc_host *host);

/* set_place(tell, count): what answers peers that wait for this rank. `tell() -> (text, group,
 * sequence, is_gather)`, as fc_place; `count(group) -> int | None`. */
PyObject *fc_set_place(PyObject *module, PyObject *args);

#endif
