/* Private memory for unsharded units: a small pool, reused across units and steps.
 *
 * acquire returns the smallest free slot that is large enough; otherwise free ones make place for a
 * new one, so that the pool never holds more than what was in use at once. The caller gives slots
 * back; the pool owns them. Threading: serialized.
 */
#ifndef FC_ENGINE_SLOTS_H
#define FC_ENGINE_SLOTS_H

#include "base/status.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_slots fc_slots;

FC_MUST_CHECK fc_status fc_slots_create(fc_slots **out);
/* All slots must have been released. NULL is fine. */
void fc_slots_destroy(fc_slots *slots);
FC_MUST_CHECK fc_status fc_slots_acquire(fc_slots *slots, size_t bytes, void **out);
void fc_slots_release(fc_slots *slots, void *slot);
/* Gives the memory of free slots back to the system. */
void fc_slots_trim(fc_slots *slots);
size_t fc_slots_bytes(const fc_slots *slots);

#ifdef __cplusplus
}
#endif
#endif
