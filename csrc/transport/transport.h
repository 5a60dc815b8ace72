/* Moves bytes between the ranks of one process group. Knows nothing of parameters.
 *
 * Two kinds. A *mapped* transport (shm) gives every rank the same memory and lets it wait for what
 * peers publish there. A *message* transport (callback) runs collectives of somebody else's process
 * group. Callers ask fc_transport_is_mapped() once, at set-up.
 *
 * Threading: serialized per transport object. Creation, map_region and close are collective.
 * After a failure other than FC_AGAIN or FC_ERR_INTERRUPTED the transport is broken for good: each
 * later call fails at once with the first failure's text.
 */
#ifndef FC_TRANSPORT_TRANSPORT_H
#define FC_TRANSPORT_TRANSPORT_H

#include "base/dtype.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_transport fc_transport;

#define FC_PLACE_BYTES 232

/* Where the program of a rank is, told to those who wait for it. */
typedef struct fc_place {
    char text[FC_PLACE_BYTES]; /* "train.py:41 in main"; empty: unknown */
    /* The collective that the program sits in: of which process group (0: in none that all its
     * ranks must call, or not known), and how many of that group it has called, this one too. */
    uint64_t group;
    uint64_t sequence;
    uint32_t is_gather; /* of full parameters */
} fc_place;

/* What the embedding program supplies. All borrowed until the transport is destroyed. */
typedef struct fc_host_ops {
    void *context;
    /* Set-up only: every rank gives `bytes` bytes and gets all ranks', in rank order. `what` names
     * the step; ranks that name different steps must all fail. `all_out` NULL: the others' bytes
     * are not wanted. Optional when n_ranks is 1. */
    fc_status (*exchange)(void *context, const char *what, const void *mine, size_t bytes,
                          void *all_out);
    /* Around a wait that sleeps: give up and take back the interpreter's lock. Optional. */
    void (*enter_wait)(void *context);
    void (*leave_wait)(void *context);
    /* Every 50 ms of a wait, between leave_wait and enter_wait: FC_ERR_INTERRUPTED to stop it
     * (Ctrl-C). Optional. */
    fc_status (*poll)(void *context);
    /* In a wait that outlasts 5 s, and again at growing intervals: one line of text for stderr.
     * Optional. */
    void (*notice)(void *context, const char *line);
    /* Of the process, whatever transport: where its program is. Called by a thread of this
     * library's own, only while a peer asks. False: not known. Optional. */
    bool (*tell_place)(fc_place *out);
    /* How many collectives of a process group (as fc_place names it) this rank has called; called
     * as `poll` is. False: not known, or not to be compared. Optional. */
    bool (*count_collectives)(uint64_t group, uint64_t *count_out);
} fc_host_ops;

typedef struct fc_transport_config {
    const char *name; /* of the process group, for messages; copied */
    int rank;
    int n_ranks;
    const int *global_ranks; /* n_ranks entries for messages: "rank 3"; copied */
    int64_t timeout_ns;      /* deadline of each wait */
    fc_host_ops host;
} fc_transport_config;

/* Memory that every rank maps. Owned by the caller; destroyed when the last reference goes. */
typedef struct fc_region {
    char *shared; /* read and write; all ranks see the writes */
    char *view;   /* same bytes for reading; a write to it stays private until discarded */
    size_t bytes;
    size_t spare; /* behind them, not in `view`; they take memory as they are written */
} fc_region;

/* What a rank waits for, told to people when it takes long or fails. */
typedef struct fc_wait_info {
    const char *op;   /* "reduce-scatter" */
    const char *unit; /* "layers.3"; NULL if none */
    uint64_t sequence;
} fc_wait_info;

/* ---- shared memory ---- */

/* Attaches all ranks of one host. FC_ERR_UNSUPPORTED on every rank when some of them cannot share
 * memory (other host, other pid namespace, ranks that are threads of one process). */
FC_MUST_CHECK fc_status fc_shm_create(const fc_transport_config *config, fc_transport **out);

/* ---- callback: collectives of another process group ---- */

/* Whom a gather brings what ranks send: `bytes` of it that begin at `at`, of each rank in order.
 * Before anything is taken the first bytes of all ranks are looked at. After a failure, which the
 * gather returns, nothing more comes. */
typedef struct fc_gathered {
    void *context;
    fc_status (*look)(void *context, int rank, const char *data, size_t bytes);
    fc_status (*take)(void *context, int rank, size_t at, const char *data, size_t bytes);
} fc_gathered;

typedef struct fc_message_ops {
    void *context;
    const char *kind; /* as fc_transport_kind tells it; static, or NULL: "callback" */
    /* recv holds n_ranks * send_bytes. */
    fc_status (*all_gather)(void *context, void *recv, const void *send, size_t send_bytes);
    /* SUM; send holds n_ranks * recv_numel elements. send may be overwritten. */
    fc_status (*reduce_scatter)(void *context, void *recv, void *send, size_t recv_numel,
                                fc_dtype dtype);
    fc_status (*all_reduce)(void *context, void *data, size_t numel,
                            fc_dtype dtype); /* SUM, in place */
    fc_status (*broadcast)(void *context, void *data, size_t bytes, int root);
    /* Blocks in rank order, one after another: recv_bytes[r] come from rank r, send_bytes[r] go to
     * it. */
    fc_status (*all_to_all)(void *context, void *recv, const size_t *recv_bytes, const void *send,
                            const size_t *send_bytes);
    fc_status (*barrier)(void *context);
    /* NULL, or told before a collective of a domain which of its units is the first to travel. */
    fc_status (*begin)(void *context, size_t unit);
    /* NULL, all of them, or: all_gather without memory for what comes; and one that is begun, and
     * ended or dropped, on all ranks alike, after other calls. `send` lies still until then.
     * FC_AGAIN: one is under way. */
    fc_status (*gather)(void *context, const void *send, size_t send_bytes, const fc_gathered *to);
    fc_status (*gather_begin)(void *context, const void *send, size_t send_bytes);
    fc_status (*gather_end)(void *context, const fc_gathered *to);
    void (*gather_drop)(void *context);
    /* The same of reduce_scatter; whether `send` is needed to the end. */
    fc_status (*sum_begin)(void *context, void *send, size_t recv_numel, fc_dtype dtype,
                           bool *is_lent_out);
    fc_status (*sum_end)(void *context, void *recv);
    void (*sum_drop)(void *context);
    /* NULL, both, or told that all ranks have come to a phase of a domain, and that this one has
     * left it by an exception: who waits for it there gets FC_ERR_PEER. */
    void (*open_phase)(void *context);
    void (*fail_phase)(void *context);
    /* NULL, or: this rank comes to no collective any more, and why. Who waits for it, now or later,
     * fails with `text`; its own later calls with FC_ERR_BROKEN. */
    void (*give_up)(void *context, const char *text);
    void (*release)(void *context); /* when the transport is destroyed */
} fc_message_ops;

FC_MUST_CHECK fc_status fc_callback_create(const fc_transport_config *config,
                                           const fc_message_ops *ops, fc_transport **out);

/* ---- both kinds ---- */

/* Of a kind by its name: "shm", or "callback" over `messages`, which are released with the
 * transport, or at once by one that has no use for them, and by a failure. */
FC_MUST_CHECK fc_status fc_transport_create(const char *kind, const fc_transport_config *config,
                                            const fc_message_ops *messages, fc_transport **out);
const char *fc_transport_kind(const fc_transport *transport);

/* Of fc_transport_config; 0, which is refused there, for what is no time to wait. */
int64_t fc_transport_timeout_ns(double seconds);

void fc_transport_destroy(fc_transport *transport); /* local; NULL is fine */
int fc_transport_rank(const fc_transport *transport);
int fc_transport_n_ranks(const fc_transport *transport);
int fc_transport_global_rank(const fc_transport *transport, int rank);
const char *fc_transport_name(const fc_transport *transport); /* of the process group; borrowed */
bool fc_transport_is_mapped(const fc_transport *transport);
const fc_message_ops *fc_transport_messages(const fc_transport *transport); /* NULL if mapped */

/* FC_OK, or why this transport is broken. */
FC_MUST_CHECK fc_status fc_transport_check(fc_transport *transport);

/* Breaks the transport on every rank: peers' waits end with this rank and `text` in their message.
 * Returns `status` after recording `text` here too. */
fc_status fc_transport_abort(fc_transport *transport, fc_status status, const char *text);

/* ---- mapped kind only ---- */

/* Collective. Zeroed memory of `bytes` (equal on all ranks, else FC_ERR_MISMATCH on all of them);
 * fingerprint must be equal too: `what` says in the error what differs. Failure on one rank (no
 * memory, no descriptors) is FC_ERR_* on all, naming it, and leaves the transport usable. */
FC_MUST_CHECK fc_status fc_transport_map_region(fc_transport *transport, const char *what,
                                                size_t bytes, uint64_t fingerprint,
                                                fc_region **out);
/* The same, and behind `bytes`, of whole pages, `spare` more, of whole pages too, which take memory
 * as they are written; they are not reserved, and count nowhere. */
FC_MUST_CHECK fc_status fc_transport_map_with_spare(fc_transport *transport, const char *what,
                                                    size_t bytes, size_t spare,
                                                    uint64_t fingerprint, fc_region **out);

/* Collective, in the place of fc_transport_map_region on a rank that failed before it: all ranks
 * get `status` and this rank's last message, and the transport stays as it was. */
FC_MUST_CHECK fc_status fc_transport_refuse_region(fc_transport *transport, const char *what,
                                                   fc_status status);
void fc_region_retain(fc_region *region);
void fc_region_release(fc_region *region);
/* Drops this rank's private writes to view[offset, offset + bytes), widened to pages. */
void fc_region_discard_writes(fc_region *region, size_t offset, size_t bytes);
/* Gives the memory of whole pages in the range back, on all ranks; they read as zeros then. */
void fc_region_give_back(fc_region *region, size_t offset, size_t bytes);

/* A word that one rank writes and others wait for; 8-byte aligned, in a region. Only grows. */
typedef struct fc_word {
    uint64_t value;
} fc_word;

uint64_t fc_word_load(const fc_word *word); /* acquire */
/* Release store, then wakes peers that sleep on this rank. No system call while nobody sleeps. */
void fc_transport_publish(fc_transport *transport, fc_word *word, uint64_t value);

/* Blocks until ready(arg), which reads words that `peer` publishes. Yields first, then sleeps; ends
 * early when the peer's process is gone (ready() is asked once more first), when any rank aborted,
 * on the deadline, on Ctrl-C, and when neither could go on: the peer sits in a collective of a
 * process group that this rank has not called, or waits here for this rank. The message names the
 * ranks, `info`, what the peer did last and where it is.
 */
typedef bool (*fc_ready_fn)(void *arg);
FC_MUST_CHECK fc_status fc_transport_wait(fc_transport *transport, int peer, fc_ready_fn ready,
                                          void *arg, const fc_wait_info *info);

/* From now on no peer learns where this process's program is, and no call of fc_host_ops.tell_place
 * goes on. Without the locks that such a call may want. */
void fc_transport_stop_telling(void);

/* How a program ended that ran to its end; one that was killed says nothing. */
typedef enum fc_end {
    FC_END_UNTOLD,
    FC_END_IN_ORDER,
    FC_END_BY_EXCEPTION
} fc_end;

/* To the peers of all transports over shared memory, who find it once this process is gone. */
void fc_transport_tell_end(fc_end end);

#define FC_END_BYTES 128

/* Which rank of this host is at its end, and how: "rank 1 (pid 4711) ended its script". False: none
 * that shares a transport over shared memory with this process. */
bool fc_transport_find_end(char out[FC_END_BYTES]);

/* Waits so far (those that did not find ready() true at once) and nanoseconds spent in them. */
void fc_transport_wait_stats(const fc_transport *transport, uint64_t *waits_out,
                             uint64_t *wait_ns_out);

#ifdef __cplusplus
}
#endif
#endif
