/* What a transport asks of the Python process it lives in: exchange, the GIL, signals, stderr. */
#ifndef FC_BIND_PYTHON_CALLBACKS_H
#define FC_BIND_PYTHON_CALLBACKS_H

#include <Python.h>

#include "bind/python/python.h"
#include "transport/transport.h"

struct fc_host {
    fc::Ref exchange; /* exchange(what: str, mine: bytes) -> list[bytes] */
    int n_ranks = 0;
};

/* The operations over `host`, which outlives their use. */
fc_host_ops fc_host_get_ops(fc_host *host);

#endif
