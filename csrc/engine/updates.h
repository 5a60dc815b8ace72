/* What shards have seen: steps of the optimizers that hold some of them, and loads.
 *
 * Copies of shards that were gathered before the last of these are out of date, and ranks whose
 * shards have not seen equally many are out of step.
 *
 * Ownership: a counter lives as long as somebody holds it, whoever that is. Threading: serialized.
 */
#ifndef FC_ENGINE_UPDATES_H
#define FC_ENGINE_UPDATES_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How often one optimizer has stepped. */
typedef struct fc_step_counter fc_step_counter;

FC_MUST_CHECK fc_status fc_step_counter_create(fc_step_counter **out);
void fc_step_counter_retain(fc_step_counter *counter);
void fc_step_counter_release(fc_step_counter *counter); /* NULL is fine */
void fc_step_counter_count(fc_step_counter *counter);

/* An optimizer, and how often it had stepped when it came to hold some of the shards. */
typedef struct fc_followed {
    fc_step_counter *counter; /* held */
    uint64_t before;
} fc_followed;

/* Of some shards; zeros: of shards that nothing has happened to. */
typedef struct fc_updates {
    fc_followed *followed; /* owned; in the order of the counters' places */
    size_t n_followed, room;
    uint64_t n_loads;
} fc_updates;

/* From now on the counter's steps are seen. False in `is_news_out`: they are already. */
FC_MUST_CHECK fc_status fc_updates_follow(fc_updates *updates, fc_step_counter *counter,
                                          bool *is_news_out);
void fc_updates_load(fc_updates *updates);
uint64_t fc_updates_count(const fc_updates *updates);
/* Adds what other shards have seen; steps of an optimizer that holds some of both count once. */
FC_MUST_CHECK fc_status fc_updates_add(fc_updates *updates, const fc_updates *more);
/* They are those of shards that nothing has happened to; fine on zeros. */
void fc_updates_clear(fc_updates *updates);

#ifdef __cplusplus
}
#endif
#endif
