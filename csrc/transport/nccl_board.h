/* What the ranks of one host know of each other beside NCCL: who lives, who has given up, and which
 * collective each of them called last. NCCL itself notices none of these.
 *
 * Every rank owns a page of shared memory that its peers read. A peer on another host, or whose
 * process cannot be seen, has no page here: of it only NCCL's own errors and time-outs tell.
 * Threading: multi after create and until destroy, but for deeds, which one thread posts.
 */
#ifndef FC_TRANSPORT_NCCL_BOARD_H
#define FC_TRANSPORT_NCCL_BOARD_H

#include "base/status.h"
#include "transport/nccl_api.h"
#include "transport/transport_impl.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FC_NCCL_UNIT_BYTES 72
#define FC_NCCL_COMMS 2 /* of a group, at most */

typedef struct fc_nccl_board fc_nccl_board;

/* What a rank does; ranks that do the same have the same but for `sequence`. */
typedef struct fc_nccl_deed {
    uint64_t sequence; /* from 1 */
    uint64_t bytes;
    uint64_t form;   /* the element type, or the sizes that `bytes` adds up */
    uint64_t detail; /* a fingerprint of the parameters whose gradients take part, or 0 */
    char op[20];
    char unit[FC_NCCL_UNIT_BYTES];
} fc_nccl_deed;

/* Collective, over the exchange of `base`; also tells all ranks' ids: FC_NCCL_COMMS of each, in
 * rank order in `all_out`. A rank that failed before (`so_far`, with its last
 * message) says so, and all fail alike. */
FC_MUST_CHECK fc_status fc_nccl_board_create(fc_transport *base, fc_status so_far,
                                             const fc_nccl_id *mine, fc_nccl_id *all_out,
                                             fc_nccl_board **out);
void fc_nccl_board_destroy(fc_nccl_board *board); /* NULL is fine */

/* How many ranks beside this one are watched. */
int fc_nccl_board_n_watched(const fc_nccl_board *board);

/* Shows what this rank is about to do in communicator `comm`. FC_ERR_MISMATCH if a rank on the
 * board did something else in the same place of the order, FC_AGAIN if one has given up: look. */
FC_MUST_CHECK fc_status fc_nccl_board_post(fc_nccl_board *board, int comm,
                                           const fc_nccl_deed *deed);

/* What this rank did last in communicator `comm`; false: nothing. */
FC_MUST_CHECK bool fc_nccl_board_own(const fc_nccl_board *board, int comm, fc_nccl_deed *out);

/* FC_OK, or that a rank's process is gone (FC_ERR_PEER) or has given up (its own words). */
FC_MUST_CHECK fc_status fc_nccl_board_look(fc_nccl_board *board);

/* Tells the ranks of this host, once. */
void fc_nccl_board_give_up(fc_nccl_board *board, fc_status status, const char *text);

/* This rank leaves in order: its end is no failure from here on. */
void fc_nccl_board_leave(fc_nccl_board *board);

/* Who is behind `sequence` in communicator `comm`, with what each did last; who is not watched.
 * False: nobody that can be seen is. */
bool fc_nccl_board_tell(const fc_nccl_board *board, int comm, uint64_t sequence, char *out,
                        size_t bytes);

#endif
