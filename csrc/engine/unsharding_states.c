/* What becomes of a unit in which state: one table. */
#include "engine/unsharding_private.h"

#include <assert.h>

#define NEVER FC_UNIT_STATE_COUNT

/* By state: SHARDED, SLICED, REQUESTED, GATHERED, AHEAD, UNSHARDED, KEPT. */
#define ROW(a, b, c, d, e, f, g)                                                                   \
    {FC_UNIT_##a, FC_UNIT_##b, FC_UNIT_##c, FC_UNIT_##d, FC_UNIT_##e, FC_UNIT_##f, FC_UNIT_##g}
#define FC_UNIT_NEVER NEVER

static const unsigned char next_state[FC_UNIT_EVENT_COUNT][FC_UNIT_STATE_COUNT] = {
    [FC_UNIT_ASK] = ROW(REQUESTED, REQUESTED, REQUESTED, GATHERED, GATHERED, NEVER, NEVER),
    [FC_UNIT_GATHER] = ROW(GATHERED, GATHERED, GATHERED, GATHERED, NEVER, NEVER, NEVER),
    [FC_UNIT_COME_ALONG] = ROW(AHEAD, AHEAD, NEVER, NEVER, NEVER, NEVER, NEVER),
    [FC_UNIT_OUTDATE] = ROW(NEVER, NEVER, NEVER, REQUESTED, NEVER, NEVER, NEVER),
    [FC_UNIT_SHOW] = ROW(NEVER, NEVER, UNSHARDED, UNSHARDED, NEVER, NEVER, NEVER),
    [FC_UNIT_SHOW_COPY] = ROW(NEVER, NEVER, NEVER, KEPT, NEVER, NEVER, NEVER),
    [FC_UNIT_KEEP] = ROW(NEVER, NEVER, NEVER, NEVER, NEVER, KEPT, KEPT),
    [FC_UNIT_RENEW] = ROW(NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, UNSHARDED),
    [FC_UNIT_RESHARD] = ROW(NEVER, SHARDED, NEVER, NEVER, NEVER, SHARDED, SHARDED),
    [FC_UNIT_RESHARD_TO_SLICE] = ROW(NEVER, NEVER, NEVER, NEVER, NEVER, SLICED, SLICED),
    [FC_UNIT_DROP] = ROW(SHARDED, NEVER, SHARDED, SHARDED, SHARDED, NEVER, NEVER),
    [FC_UNIT_DROP_TO_SLICE] = ROW(NEVER, SLICED, SLICED, SLICED, SLICED, NEVER, NEVER),
};

#undef ROW

static const char *const state_texts[] = {
#define FC_UNSHARDING_TEXT(name, text) text,
    FC_UNSHARDING_STATES(FC_UNSHARDING_TEXT)};
static const char *const event_texts[] = {FC_UNSHARDING_EVENTS(FC_UNSHARDING_TEXT)
#undef FC_UNSHARDING_TEXT
};

fc_status fc_unsharding_next(fc_unsharding_state state, fc_unsharding_event event,
                             fc_unsharding_state *next_out)
{
    const unsigned char next = next_state[event][state];

    if (next == NEVER) {
        return fc_fail(FC_ERR_STATE, "a unit that is %s %s", state_texts[state],
                       event_texts[event]);
    }
    *next_out = (fc_unsharding_state)next;
    return FC_OK;
}

void unsharding_turn(fc_unsharding *u, fc_unsharding_event event)
{
    const unsigned char next = next_state[event][u->state];

    assert(next != NEVER);
    u->state = next;
}
