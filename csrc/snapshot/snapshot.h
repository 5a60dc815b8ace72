/* A copy of memory in a file that outlives its process: where things lie, and when it counts.
 *
 * A file is mapped, and has room for one snapshot:
 *   a page         the header; words that ranks read of each other; a text of the owner's
 *   the data       pieces of memory in order, each from a multiple of FC_ALIGN on, zeros between
 *   the index      bytes that say what the pieces are
 * The header's last word is a sum of the others and is written when all else is there: a process
 * may be killed at any time, and who reads the file later sees whether it is whole. All memory is
 * the caller's. Threading: multi, calls that write serialized per file.
 */
#ifndef FC_SNAPSHOT_SNAPSHOT_H
#define FC_SNAPSHOT_SNAPSHOT_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_SNAPSHOT_PAGE 4096U  /* bytes before the data */
#define FC_SNAPSHOT_WORDS 8U    /* that ranks read of each other; 0 in a new file */
#define FC_SNAPSHOT_TEXT_AT 512 /* of the owner's text in the page */

/* Part of the memory of a rank. */
typedef struct fc_snapshot_piece {
    const void *memory;
    size_t bytes;
    size_t at;   /* from the data's begin: set by fc_snapshot_place */
    bool is_now; /* it may change as soon as the copy has begun */
} fc_snapshot_piece;

/* What a header says. */
typedef struct fc_snapshot_facts {
    uint64_t sequence; /* grows by one with each snapshot of a run */
    uint64_t step;
    uint64_t data_bytes;
    uint64_t index_bytes;
} fc_snapshot_facts;

/* Puts pieces one after the other; returns the bytes of all. */
size_t fc_snapshot_place(fc_snapshot_piece *pieces, size_t n);

/* Whether a snapshot in the file was finished; facts of it. */
bool fc_snapshot_read(const void *file, size_t file_bytes, fc_snapshot_facts *out);

/* Whether data and index of a finished one are as they were written: reads all of them. */
bool fc_snapshot_is_intact(const void *file, size_t file_bytes);

/* From now on the file holds none. */
void fc_snapshot_clear(void *file);

#define FC_SNAPSHOT_HEADER 72U /* bytes */

/* The header of a file, for a copy of it elsewhere. */
void fc_snapshot_header(const void *file, void *out);

/* Data and index are there as another file has them, and count from now on with its header. False:
 * that is none of a snapshot that fits; nothing counts then. */
bool fc_snapshot_adopt(void *file, size_t file_bytes, const void *header);

/* Word `i` of the page. */
uint64_t fc_snapshot_word(const void *file, size_t i);
void fc_snapshot_set_word(void *file, size_t i, uint64_t value);

#ifdef __cplusplus
}
#endif
#endif
