/* Signs of life: a thread leaves a word about this rank in a store every second, and looks there
 * for those of ranks that somebody waits for. A store that does not answer keeps the thread and
 * nobody else. Threading: multi, but for start and stop.
 */
#ifndef FC_COMM_BEATS_H
#define FC_COMM_BEATS_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_BEATS_WORDS 256 /* bytes, with the end */

/* A store in common; called by the thread alone, any status but FC_OK is no answer. */
typedef struct fc_beats_ops {
    void *context;
    fc_status (*set)(void *context, int rank, const char *words);
    /* Empty if the rank has left nothing yet. */
    fc_status (*get)(void *context, int rank, char *words);
    void (*release)(void *context);
} fc_beats_ops;

typedef struct fc_beats fc_beats;

/* Releases `ops` at the end of the thread, or if this fails. `period_ns` between signs; 0: a
 * second.
 */
FC_MUST_CHECK fc_status fc_beats_start(const fc_beats_ops *ops, int rank, int64_t period_ns,
                                       fc_beats **out);
/* A thread that the store keeps goes on alone. */
void fc_beats_stop(fc_beats *beats);

/* What stands beside this rank's next signs. */
void fc_beats_say(fc_beats *beats, const char *words);
/* Whose signs are looked for from now on. */
FC_MUST_CHECK fc_status fc_beats_want(fc_beats *beats, const int *ranks, size_t n);

typedef struct fc_beat {
    char words[FC_BEATS_WORDS];
    int64_t at_ns; /* when a sign was found last that was new; 0: none yet */
} fc_beat;

/* Of a rank that is wanted, or was until now. */
fc_beat fc_beats_heard(fc_beats *beats, int rank);
/* When the store answered last; at first when it was started. */
int64_t fc_beats_answered_ns(fc_beats *beats);

#ifdef __cplusplus
}
#endif
#endif
