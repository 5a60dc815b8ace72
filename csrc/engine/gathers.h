/* Which way an all-gather brings a unit's parameters on a device. Pure functions.
 *
 * *Staged*: one all-gather of packs into a slot, then a kernel copies out. *Direct*: an all-gather
 * per parameter, all in one group, straight to its place in the unsharded buffer.
 */
#ifndef FC_ENGINE_GATHERS_H
#define FC_ENGINE_GATHERS_H

#include "engine/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether it may be direct: every parameter is its ranks' chunks one after another, without
 * padding. */
bool fc_gathers_fit(const fc_layout *layout);

/* Why the unit is staged, for people; NULL: it is direct, as is faster. The same on all ranks.
 * `has_groups`: all-gathers can be made as one piece of work. */
const char *fc_gathers_why_staged(const fc_layout *layout, bool has_groups);

#ifdef __cplusplus
}
#endif
#endif
