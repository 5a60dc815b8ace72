/* A list of slots, each free or in use. There are few, so searches are linear. */
#include "engine/slots.h"

#include "base/alloc.h"

#include <stdbool.h>

typedef struct slot {
    void *memory;
    size_t bytes;
    bool is_used;
    struct slot *next;
} slot;

struct fc_slots {
    slot *first; /* owned */
    size_t bytes;
};

fc_status fc_slots_create(fc_slots **out)
{
    fc_slots *slots = fc_alloc(1, sizeof(*slots));

    if (slots == NULL) {
        return fc_fail(FC_ERR_NOMEM, "slot pool");
    }
    *out = slots;
    return FC_OK;
}

void fc_slots_trim(fc_slots *slots)
{
    slot **link = &slots->first;

    while (*link != NULL) {
        slot *s = *link;

        if (s->is_used) {
            link = &s->next;
        } else {
            *link = s->next;
            slots->bytes -= s->bytes;
            fc_pages_free(FC_FOR_SLOTS, s->memory, s->bytes);
            fc_free(s);
        }
    }
}

void fc_slots_destroy(fc_slots *slots)
{
    if (slots != NULL) {
        fc_slots_trim(slots);
        fc_free(slots);
    }
}

fc_status fc_slots_acquire(fc_slots *slots, size_t bytes, void **out)
{
    slot *s, *best = NULL;

    for (s = slots->first; s != NULL; s = s->next) {
        if (!s->is_used && s->bytes >= bytes && (best == NULL || s->bytes < best->bytes)) {
            best = s;
        }
    }
    if (best == NULL) {
        fc_slots_trim(slots);
        best = fc_alloc(1, sizeof(*best));
        if (best == NULL) {
            return fc_fail(FC_ERR_NOMEM, "slot of %zu bytes", bytes);
        }
        best->bytes = fc_round_up(bytes ? bytes : 1, FC_PAGE);
        best->memory = fc_pages_alloc(FC_FOR_SLOTS, best->bytes);
        if (best->memory == NULL) {
            fc_free(best);
            return fc_fail(FC_ERR_NOMEM, "slot of %zu bytes for an unsharded unit", bytes);
        }
        best->next = slots->first;
        slots->first = best;
        slots->bytes += best->bytes;
    }
    best->is_used = true;
    *out = best->memory;
    return FC_OK;
}

void fc_slots_release(fc_slots *slots, void *memory)
{
    slot *s;

    for (s = slots->first; s != NULL; s = s->next) {
        if (s->memory == memory) {
            s->is_used = false;
            return;
        }
    }
}

size_t fc_slots_bytes(const fc_slots *slots)
{
    return slots->bytes;
}
