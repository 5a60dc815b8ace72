/* One piece of memory without a name that several processes map.
 *
 * The creator's descriptor is opened by peers through /proc, so nothing is left behind when any of
 * them is killed. Descriptors are owned by the caller; mappings live on after they are closed.
 */
#ifndef FC_TRANSPORT_SHM_SEGMENT_H
#define FC_TRANSPORT_SHM_SEGMENT_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the creator tells its peers; proven on attach by the header inside the segment. */
typedef struct fc_segment_id {
    uint64_t nonce;
    uint64_t bytes;
    int32_t pid;
    int32_t fd;
    uint32_t n_ranks;
    uint32_t reserved;
} fc_segment_id;

/* Zeroed memory, all of it reserved: later use cannot run out. Behind it `spare` bytes, of whole
 * pages, as are `bytes` then, which take memory as they are written. FC_ERR_NOMEM or
 * FC_ERR_SYSTEM. */
FC_MUST_CHECK fc_status fc_segment_create(const char *what, size_t bytes, size_t spare, int n_ranks,
                                          fc_segment_id *out);

/* FC_ERR_UNSUPPORTED when the creator's descriptor cannot be reached or is something else. */
FC_MUST_CHECK fc_status fc_segment_open(const fc_segment_id *id, int *fd_out);

/* Maps the bytes behind the header. A private mapping reads what others write; own writes stay
 * private. */
FC_MUST_CHECK fc_status fc_segment_map(int fd, size_t bytes, size_t spare, bool is_private,
                                       char **out);
void fc_segment_unmap(char *memory, size_t bytes);
void fc_segment_close(int fd); /* -1 is fine */

#endif
