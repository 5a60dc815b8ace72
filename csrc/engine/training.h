/* Where a unit, or the module around it, is in a step, and what moves it on. */
#ifndef FC_ENGINE_TRAINING_H
#define FC_ENGINE_TRAINING_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fc_training {
    FC_TRAINING_FORWARD,
    FC_TRAINING_PRE_BACKWARD,  /* backward needs it */
    FC_TRAINING_POST_BACKWARD, /* backward is through it */
    FC_TRAINING_IDLE
} fc_training;
#define FC_TRAINING_COUNT (FC_TRAINING_IDLE + 1)

/* X(name, what it says) */
#define FC_TRAINING_EVENTS(X)                                                                      \
    X(ENTERED, "forward enters it")                                                                \
    X(LEFT, "forward leaves it")                                                                   \
    X(REACHED, "backward reaches it")                                                              \
    X(PASSED, "backward is through it")                                                            \
    X(ENDED, "the backward has ended, or all of the step is dropped")

typedef enum fc_training_event {
#define FC_TRAINING_ENUM(name, what) FC_TRAINING_##name,
    FC_TRAINING_EVENTS(FC_TRAINING_ENUM)
#undef FC_TRAINING_ENUM
    FC_TRAINING_EVENT_COUNT
} fc_training_event;

/* Moves on. True if the event is news there: of those that repeat only the first one is, and only
 * a forward can be left. */
bool fc_training_move(fc_training *training, fc_training_event event);

#ifdef __cplusplus
}
#endif
#endif
