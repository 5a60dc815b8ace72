/* What others see of a packed section: the parameters that have a gradient. */
#include "engine/present.h"

#include <string.h>

/* The bytes of a parameter in a row of the section; 0 if it lies elsewhere or has no gradient. */
static size_t bytes_in(const fc_present *present, const fc_section *section, size_t i)
{
    const fc_param *p = &present->layout->params[i];
    const bool is_present = (present->mask[i / 64] >> (i % 64) & 1) != 0;
    const bool is_there = p->part_at >= section->at && p->part_at < section->at + section->bytes;

    return p->has_grad && is_present && is_there ? p->chunk_numel * fc_dtype_bytes(p->reduce) : 0;
}

static size_t row_bytes(const fc_present *present, const fc_section *section)
{
    size_t bytes = 0;

    for (size_t i = 0; i < present->layout->n_params && present->mask != NULL; i++) {
        bytes += bytes_in(present, section, i);
    }
    return bytes != 0 ? bytes : section->bytes;
}

size_t present_pack(const fc_present *present, const fc_section *section, char *rows, size_t n_rows)
{
    const size_t row = row_bytes(present, section);
    char *to = rows;

    for (size_t r = 0; r < n_rows && row != section->bytes; r++) {
        const char *from = rows + r * section->bytes;

        for (size_t i = 0; i < present->layout->n_params; i++) {
            const size_t bytes = bytes_in(present, section, i);

            if (bytes != 0) {
                memmove(to, from + (present->layout->params[i].part_at - section->at), bytes);
                to += bytes;
            }
        }
    }
    return row;
}

/* From the end on: each lies at its place or before it. */
void present_unpack(const fc_present *present, const fc_section *section, char *row)
{
    size_t at = row_bytes(present, section);

    for (size_t i = present->layout->n_params; i-- > 0 && at != section->bytes;) {
        const size_t bytes = bytes_in(present, section, i);

        if (bytes != 0) {
            at -= bytes;
            memmove(row + (present->layout->params[i].part_at - section->at), row + at, bytes);
        }
    }
}
