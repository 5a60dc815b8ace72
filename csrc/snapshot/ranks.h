/* The pages of the ranks whose files lie in one place, and the end of their run.
 *
 * Each rank writes words of its own page and reads the others'. When all of them have ended, the
 * last one removes the files of all: a rank that has ended may be started again with the others as
 * long as one of them is at work, and then needs its own.
 * Threading: serialized per object.
 */
#ifndef FC_SNAPSHOT_RANKS_H
#define FC_SNAPSHOT_RANKS_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_snapshot_ranks fc_snapshot_ranks;

/* `pages`: a file of each rank, `own` this rank's, which must be there and as long as a page.
 * `files`: what is to be removed. Ends, too, when the process exits with status 0; not in a child
 * made by fork. FC_ERR_SYSTEM, FC_ERR_NOMEM. */
FC_MUST_CHECK fc_status fc_snapshot_ranks_open(const char *const *pages, size_t n_ranks, size_t own,
                                               const char *const *files, size_t n_files,
                                               fc_snapshot_ranks **out);
void fc_snapshot_ranks_close(fc_snapshot_ranks *ranks); /* not an end; NULL is fine */

/* Word `i` of a rank's page; the last one says that it has ended. */
uint64_t fc_snapshot_ranks_word(const fc_snapshot_ranks *ranks, size_t rank, size_t i);
void fc_snapshot_ranks_set_word(fc_snapshot_ranks *ranks, size_t i, uint64_t value); /* own */

/* This rank has ended well. True: it was the last one, and the files are gone. */
bool fc_snapshot_ranks_end(fc_snapshot_ranks *ranks);

#ifdef __cplusplus
}
#endif
#endif
