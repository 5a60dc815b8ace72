/* What every kind of transport has: the fields behind fc_transport, private to this folder. */
#ifndef FC_TRANSPORT_IMPL_H
#define FC_TRANSPORT_IMPL_H

#include "transport/transport.h"

typedef struct fc_shm fc_shm;

struct fc_transport {
    /* Constant after create. */
    int rank;
    int n_ranks;
    int64_t timeout_ns;
    unsigned generation; /* fc_process_generation() of the owner: a forked child has another one */

    /* Owned. */
    char *name;
    int *global_ranks;
    fc_shm *shm; /* NULL: message kind */

    /* Borrowed from the creator until destroy. */
    fc_host_ops host;
    fc_message_ops messages;

    /* Serialized like the calls. */
    fc_status broken; /* FC_OK while usable; set once */
    char broken_text[FC_MESSAGE_BYTES];
    uint64_t n_waits;
    uint64_t wait_ns;
};

/* An object with a checked copy of `config`; the kind's own fields are zero. */
FC_MUST_CHECK fc_status fc_transport_alloc(const fc_transport_config *config, fc_transport **out);
void fc_transport_free(fc_transport *transport);

/* Marks this rank's object only. Keeps the first failure. */
void fc_transport_mark_broken(fc_transport *transport, fc_status status, const char *text);

/* How long a wait has to last for people to be told once more: 5 s, and at growing intervals. */
int64_t fc_transport_notice_ns(int n_notices);

bool fc_transport_is_forked(const fc_transport *transport);

/* The shared memory kind's part of the common calls. */
void fc_shm_destroy(fc_transport *transport);
void fc_shm_abort(fc_transport *transport, fc_status status, const char *text);
void fc_shm_adopt_abort(fc_transport *transport); /* marks broken if any rank aborted */

#endif
