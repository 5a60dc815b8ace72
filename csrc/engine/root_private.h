/* Inside of a root: what its forwards and its backwards share. */
#ifndef FC_ENGINE_ROOT_PRIVATE_H
#define FC_ENGINE_ROOT_PRIVATE_H

#include "engine/domain_private.h"
#include "engine/reduction_private.h"
#include "engine/root.h"
#include "window/window.h"

/* The first bound one from there on, or NULL. */
static inline fc_root_unit *bound_from(fc_root_unit *unit)
{
    while (unit != NULL && unit->reduction == NULL) {
        unit = unit->next;
    }
    return unit;
}

/* All bound units of a module. */
#define FOR_EACH_UNIT(unit, module)                                                                \
    for (fc_root_unit *unit = bound_from((module)->unit); unit != NULL;                            \
         unit = bound_from(unit->next))

/* Calls `body` for a unit and those behind it, the last one first. */
FC_MUST_CHECK static inline fc_status root_each_backwards(fc_root_course *root, fc_root_unit *unit,
                                                          fc_status (*body)(fc_root_course *root,
                                                                            fc_root_unit *unit,
                                                                            const void *context),
                                                          const void *context)
{
    fc_root_unit *const bound = bound_from(unit);

    if (bound == NULL) {
        return FC_OK;
    }
    if (bound->next != NULL) {
        FC_TRY(root_each_backwards(root, bound->next, body, context));
    }
    return body(root, bound, context);
}

/* Who looks at this process from outside sees the phase that it is in. */
static inline void root_show(const fc_root_course *root, fc_window_phase phase)
{
    if (root->n_domains > 0) {
        fc_window_enter(phase, root->domains[0]->clock >> STEP_SHIFT);
    }
}

/* For the trace: of a unit that may have been unbound. */
static inline void root_mark(const fc_root_unit *unit, fc_window_event_kind kind)
{
    if (fc_window_traces() && unit->reduction != NULL) {
        fc_window_mark(kind, unit->reduction->shard->shown_as);
    }
}

/* Peers learn that this rank has left the phase if it has. */
static inline fc_status or_fail(fc_root_course *root, fc_status status)
{
    if (status != FC_OK) {
        fc_root_fail(root);
    }
    return status;
}

/* Opens a phase in all domains. */
FC_MUST_CHECK fc_status root_open(fc_root_course *root, fc_opening opening);
/* Marks it closed in all of them and waits for the peers in each: between shards, then between
 * replicas. */
FC_MUST_CHECK fc_status root_close(fc_root_course *root);
/* Gives up what was gathered ahead and not used in the phase. */
FC_MUST_CHECK fc_status root_drop_ahead(const fc_root_course *root, fc_domain *domain);
/* Calls an operation of all bound units. */
FC_MUST_CHECK fc_status root_each_unit(const fc_root_course *root,
                                       fc_status (*operation)(void *unit));
/* Of all domains: finished units that were used again. */
uint64_t root_count_reused(const fc_root_course *root);

#endif
