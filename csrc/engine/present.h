/* What travels of a packed section: its parameters that have a gradient, as torch sends them. */
#ifndef FC_ENGINE_PRESENT_H
#define FC_ENGINE_PRESENT_H

#include "engine/waits.h"

/* Moves what the rows of a section hold of them next to one another. Gives the bytes of a row:
 * the section's own where it has all of them, or none. */
size_t present_pack(const fc_present *present, const fc_section *section, char *rows,
                    size_t n_rows);
/* Moves a row of the sum back to where its parameters lie in the section. */
void present_unpack(const fc_present *present, const fc_section *section, char *row);

#endif
