/* Walks the bytes of a block, which lie in rows, from front to back.
 */
#ifndef FC_COMM_PIECES_H
#define FC_COMM_PIECES_H

#include "comm/comm.h"

/* Where the next byte is: `at` of row `row` of the first of the pieces that are left. */
typedef struct fc_cursor {
    const fc_comm_piece *piece;
    size_t row, at;
} fc_cursor;

typedef void (*fc_copy_fn)(void *dst, const void *src, size_t bytes);

fc_cursor fc_cursor_of(const fc_comm_block *block);

/* Copies the next `bytes`, of which the block has as many, and goes on behind them. */
void fc_cursor_read(fc_cursor *from, void *to, size_t bytes, fc_copy_fn copy);
void fc_cursor_write(fc_cursor *to, const void *from, size_t bytes, fc_copy_fn copy);
void fc_cursor_move(fc_cursor *to, fc_cursor *from, size_t bytes, fc_copy_fn copy);

/* Of all pieces; SIZE_MAX if they are too many. */
size_t fc_block_bytes(const fc_comm_block *block);

#endif
