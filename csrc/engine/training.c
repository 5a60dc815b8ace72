/* The table of what moves a unit on in a step. */
#include "engine/training.h"

typedef struct move {
    fc_training to;
    bool is_news;
} move;

#define FORWARD FC_TRAINING_FORWARD
#define PRE_BACKWARD FC_TRAINING_PRE_BACKWARD
#define POST_BACKWARD FC_TRAINING_POST_BACKWARD
#define IDLE FC_TRAINING_IDLE

/* By event, and by where it is: FORWARD, PRE_BACKWARD, POST_BACKWARD, IDLE. No event is refused: an
 * exception of the caller's can end anything, and a graph can be gone through in any order. */
static const move moves[FC_TRAINING_EVENT_COUNT][FC_TRAINING_COUNT] = {
    [FC_TRAINING_ENTERED] = {{FORWARD, false}, {FORWARD, true}, {FORWARD, true}, {FORWARD, true}},
    /* A forward that is run again in a backward leaves what that one has reached. */
    [FC_TRAINING_LEFT] = {{IDLE, true}, {IDLE, false}, {IDLE, false}, {IDLE, false}},
    [FC_TRAINING_REACHED] = {{PRE_BACKWARD, true},
                             {PRE_BACKWARD, false},
                             {PRE_BACKWARD, true},
                             {PRE_BACKWARD, true}},
    [FC_TRAINING_PASSED] = {{POST_BACKWARD, true},
                            {POST_BACKWARD, true},
                            {POST_BACKWARD, false},
                            {POST_BACKWARD, true}},
    [FC_TRAINING_ENDED] = {{IDLE, true}, {IDLE, true}, {IDLE, true}, {IDLE, false}},
};

bool fc_training_move(fc_training *training, fc_training_event event)
{
    const move found = moves[event][*training];

    *training = found.to;
    return found.is_news;
}
