/* Walks over rows of bytes. */
#include "comm/pieces.h"

#include <stdint.h>

fc_cursor fc_cursor_of(const fc_comm_block *block)
{
    return (fc_cursor){.piece = block->pieces};
}

/* The next run of bytes in one row, at most `max` long. */
static char *next_run(fc_cursor *c, size_t max, size_t *bytes_out)
{
    while (c->row == c->piece->n_rows || c->piece->row_bytes == 0) {
        c->piece++;
        c->row = 0;
    }
    char *run = c->piece->data + c->row * c->piece->pitch + c->at;
    size_t left = c->piece->row_bytes - c->at;

    if (max < left) {
        c->at += max;
        *bytes_out = max;
    } else {
        c->at = 0;
        c->row++;
        *bytes_out = left;
    }
    return run;
}

void fc_cursor_read(fc_cursor *from, void *to, size_t bytes, fc_copy_fn copy)
{
    size_t n;

    for (char *out = to; bytes > 0; out += n, bytes -= n) {
        const char *run = next_run(from, bytes, &n);

        copy(out, run, n);
    }
}

void fc_cursor_write(fc_cursor *to, const void *from, size_t bytes, fc_copy_fn copy)
{
    size_t n;

    for (const char *in = from; bytes > 0; in += n, bytes -= n) {
        char *run = next_run(to, bytes, &n);

        copy(run, in, n);
    }
}

void fc_cursor_move(fc_cursor *to, fc_cursor *from, size_t bytes, fc_copy_fn copy)
{
    size_t n;

    for (; bytes > 0; bytes -= n) {
        const char *run = next_run(from, bytes, &n);

        fc_cursor_write(to, run, n, copy);
    }
}

size_t fc_block_bytes(const fc_comm_block *block)
{
    size_t total = 0;

    for (size_t i = 0; i < block->n_pieces; i++) {
        const fc_comm_piece *p = &block->pieces[i];
        size_t bytes;

        if (__builtin_mul_overflow(p->row_bytes, p->n_rows, &bytes) ||
            __builtin_add_overflow(total, bytes, &total)) {
            return SIZE_MAX;
        }
    }
    return total;
}
