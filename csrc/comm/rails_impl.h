/* Inside of rails: pairs of ranks, messages between them, memory that is kept. */
#ifndef FC_COMM_RAILS_IMPL_H
#define FC_COMM_RAILS_IMPL_H

#include "comm/comm_impl.h"
#include "comm/rails.h"

#include <stdatomic.h>

#define RAILS_PIECE_BYTES                                                                          \
    ((size_t)512 << 10) /* stays in a core's cache until peers have read it                        \
                         */
#define RAILS_PIECE_MIN ((size_t)4 << 10)
#define RAILS_STAGED_BYTES ((size_t)8 << 20) /* of a rank, in a step of a reduction */
#define RAILS_NAME_BYTES 64

typedef struct rails_buffer {
    char *data;
    size_t bytes;
} rails_buffer;

#define RAILS_FRAME_BYTES ((size_t)1 << 10)

/* What two ranks must agree on before bytes move. Travels between hosts. */
typedef struct rails_header {
    uint64_t sequence, bytes; /* of what one rank sends to another */
    uint32_t op, dtype;
    int32_t root;
    /* Not compared: the last phase that the sender left by an exception, see [Note: left phases];
     * its low bits. */
    uint32_t failed;
} rails_header;

#define RAILS_FAILED UINT32_MAX /* in the place of `op`: the sender has failed, and says why */

#define RAILS_INLINE_BYTES (RAILS_FRAME_BYTES - sizeof(rails_header))

typedef struct rails_frame {
    rails_header header;
    char data[RAILS_INLINE_BYTES];
} rails_frame;

/* Between this rank and one of another host, for collectives of a kind. Numbers are of the last one
 * in which it was so. */
typedef struct rails_line {
    rails_frame out, in;
    uint64_t opened_out, awaited_out, opened_in, awaited_in;
    void *inline_to; /* where what comes in the frame goes, and how much */
    size_t inline_bytes;
} rails_line;

/* [Note: begun collectives] A gather and a sum may be begun, and ended after others: their messages
 * travel while the caller computes. Local ranks meet in the same order, since all begin and end
 * alike. Messages between two ranks are awaited in the order in which they were begun, so who is to
 * wait for younger ones first awaits those of what was begun before: it has *arrived* then, and
 * lies still until it is ended. */
typedef enum rails_kind {
    RAILS_AT_ONCE,
    RAILS_BEGUN_GATHER,
    RAILS_BEGUN_SUM,
    RAILS_N_KINDS
} rails_kind;

/* [Note: one speaks for its host] Of small chunks a message costs more than its bytes. So all that
 * a host has goes to another host in one message, and who receives it shows it to its host: L times
 * fewer messages, for one more step in shared memory. The first rank of a host speaks to those
 * after it, the last one to those before: so that no line carries messages both ways at once, where
 * the process group's own thread asks again and again for what it may not take while this one
 * sends. All ranks decide alike, by the size of a chunk.
 */
#define RAILS_TOGETHER_BYTES ((size_t)16 << 10) /* of what one host has for another */

/* A collective that runs, the last one of its kind. */
typedef struct rails_call {
    rails_header header;
    size_t message_max; /* bytes that one rank sends to another */
    uint32_t key;
    rails_kind kind;
    /* Of one that was begun. */
    bool is_open, has_arrived;
    const char *send;
    size_t bytes;
    fc_dtype dtype;
} rails_call;

enum {
    RAILS_PIECES,   /* of sums that come and go */
    RAILS_PART,     /* this rank's part of an all_reduce */
    RAILS_TOGETHER, /* what hosts tell each other by one rank of theirs */
    RAILS_GATHERED, /* chunks that come for this host while the caller computes */
    RAILS_SUMS,     /* sums that come and go meanwhile */
    RAILS_N_BUFFERS
};

typedef struct rails {
    /* Constant after create. */
    int rank, n_ranks, n_local, host, n_hosts;
    int n_local_max;                   /* of all hosts */
    size_t held_max;                   /* of ranks whose bytes one rank brings to its host */
    size_t gather_piece, reduce_piece; /* bytes of a rank's chunk that travel at once */
    int *hosts, *places;               /* of each rank, places on its host */
    int *global_ranks;
    int *holders; /* places of who brings each rank's bytes to this host: itself if it is here */
    int *served, n_served; /* ranks of other hosts for which this rank does so */
    int *servers;          /* who does so for this rank, on each host */
    int *firsts, *lasts;   /* ranks of each host */
    int *sizes, *begins;   /* how many it has; and those before it have */
    char (*names)[RAILS_NAME_BYTES];

    /* Owned. */
    int *numbers;         /* all of the above */
    const void **sources; /* n_ranks entries of scratch for sums */
    rails_line **lines;   /* by kind and rank; NULL where nothing has been said yet */
    fc_comm *local;       /* NULL: this rank is alone on its host */
    fc_rail_ops ops;
    fc_message_ops group;

    /* Serialized like the calls. */
    rails_buffer buffers[RAILS_N_BUFFERS];
    uint64_t sequence; /* of the last collective */
    rails_call calls[RAILS_N_KINDS];
    fc_rails_sent *sent; /* owned; by host */
    bool is_broken;
    rails_frame farewell;
    char broken_text[FC_MESSAGE_BYTES];

    /* Read and written by other threads. */
    _Atomic int awaited;                          /* rank */
    _Atomic int64_t awaited_since;                /* 0: none is */
    _Atomic uint64_t awaited_in;                  /* the collective */
    _Atomic uint64_t phase, failed, failed_after; /* see [Note: left phases] */
    _Atomic int interrupted; /* rails_interrupted; the text is constant when it is READY */
    char why_interrupted[FC_MESSAGE_BYTES / 2];
} rails;

enum rails_interrupted {
    RAILS_UNDISTURBED,
    RAILS_INTERRUPTING,
    RAILS_INTERRUPTED
};

extern const fc_message_ops rails_ops; /* without context */

rails *rails_in(const fc_message_ops *ops); /* NULL: they are none */

FC_MUST_CHECK fc_status rails_check(rails *r);
/* This host's other ranks hear of it; later calls fail at once. Returns `status`. */
fc_status rails_break(rails *r, fc_status status, const char *text);

/* Opens a collective in which a rank sends `bytes` to another one. One at once waits for what was
 * begun. */
FC_MUST_CHECK fc_status rails_begin(rails *r, rails_kind kind, fc_comm_op op, size_t bytes,
                                    fc_dtype dtype, int root);
/* One rank speaks for its host in this one, see the note. */
bool rails_is_together(const rails *r, size_t bytes);
/* What was begun before that collective has arrived; and it as well. */
FC_MUST_CHECK fc_status rails_settle(rails *r, const rails_call *call);
FC_MUST_CHECK fc_status rails_arrive(rails *r, rails_call *call);
/* It ends without a use. */
void rails_drop(rails *r, rails_call *call);
/* What failed beside the rails ends them as well: messages are on their way. Returns `st`. */
fc_status rails_ended(rails *r, fc_status st);

/* Messages of no bytes are none. */
FC_MUST_CHECK fc_status rails_send(rails *r, const rails_call *call, int peer, const void *data,
                                   size_t bytes);
FC_MUST_CHECK fc_status rails_receive(rails *r, const rails_call *call, int peer, void *data,
                                      size_t bytes);
FC_MUST_CHECK fc_status rails_await_sent(rails *r, const rails_call *call, int peer, size_t bytes);
FC_MUST_CHECK fc_status rails_await_received(rails *r, const rails_call *call, int peer,
                                             size_t bytes);

FC_MUST_CHECK fc_status rails_reserve(rails_buffer *buffer, size_t bytes);
void rails_free_buffers(rails *r);

/* ---- rails_phases.c ---- */

void rails_enter_phase(rails *r, uint64_t phase); /* 1 as it begins */
void rails_open_phase(void *context);
void rails_fail_phase(void *context);
void rails_give_up(void *context, const char *text);
/* Who waits for this rank in a collective that it has not ended hears of it by its signs of life: a
 * message that was given up keeps those behind it. */
void rails_tell_broken(rails *r);
#define RAILS_BROKEN UINT64_MAX /* in the place of a phase */
/* True if the sender has left the phase that this rank is in; then FC_ERR_PEER says so. */
bool rails_has_left(const rails *r, const rails_header *theirs);
void rails_tell_left(const rails *r, int peer, char *out, size_t bytes);

/* ---- rails_gathers.c ---- */

fc_status rails_all_gather(void *context, void *recv, const void *send, size_t send_bytes);
fc_status rails_gather(void *context, const void *send, size_t send_bytes, const fc_gathered *to);
fc_status rails_gather_begin(void *context, const void *send, size_t send_bytes);
fc_status rails_gather_end(void *context, const fc_gathered *to);
void rails_gather_drop(void *context);
/* The messages of one that was begun. */
FC_MUST_CHECK fc_status rails_gather_arrive(rails *r, const rails_call *call);

/* ---- rails_sums.c ---- */

fc_status rails_reduce_scatter(void *context, void *recv, void *send, size_t recv_numel,
                               fc_dtype dtype);
fc_status rails_sum_begin(void *context, void *send, size_t recv_numel, fc_dtype dtype,
                          bool *is_lent_out);
fc_status rails_sum_end(void *context, void *recv);
void rails_sum_drop(void *context);
FC_MUST_CHECK fc_status rails_sum_arrive(rails *r, const rails_call *call);

/* ---- both ---- */

static inline size_t rails_smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline void rails_copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to != from) {
        fc_kern()->copy(to, from, bytes);
    }
}

static inline bool rails_is_other_host(const rails *r, int host)
{
    return host != r->host;
}

#endif
