/* Steps and loads that shards have seen. */
#include "engine/updates.h"

#include "base/alloc.h"

#include <string.h>

#define ROOM_MIN 4 /* most often one optimizer holds all shards of a unit */

struct fc_step_counter {
    uint64_t n;
    size_t n_holders;
};

fc_status fc_step_counter_create(fc_step_counter **out)
{
    fc_step_counter *counter = fc_alloc(1, sizeof(*counter));

    if (counter == NULL) {
        return fc_fail(FC_ERR_NOMEM, "a counter of steps");
    }
    counter->n_holders = 1;
    *out = counter;
    return FC_OK;
}

void fc_step_counter_retain(fc_step_counter *counter)
{
    counter->n_holders++;
}

void fc_step_counter_release(fc_step_counter *counter)
{
    if (counter != NULL && --counter->n_holders == 0) {
        fc_free(counter);
    }
}

void fc_step_counter_count(fc_step_counter *counter)
{
    counter->n++;
}

/* Where the counter is, or would be. */
static size_t place_of(const fc_updates *updates, const fc_step_counter *counter)
{
    size_t begin = 0, end = updates->n_followed;

    while (begin < end) {
        const size_t middle = begin + (end - begin) / 2;

        if ((uintptr_t)updates->followed[middle].counter < (uintptr_t)counter) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return begin;
}

static fc_status make_room(fc_updates *updates)
{
    const size_t room = updates->room == 0 ? ROOM_MIN : 2 * updates->room;
    fc_followed *followed;

    if (updates->n_followed < updates->room) {
        return FC_OK;
    }
    followed = fc_alloc(room, sizeof(*followed));
    if (followed == NULL) {
        return fc_fail(FC_ERR_NOMEM, "%zu optimizers that hold shards", room);
    }
    if (updates->n_followed > 0) {
        memcpy(followed, updates->followed, updates->n_followed * sizeof(*followed));
    }
    fc_free(updates->followed);
    updates->followed = followed;
    updates->room = room;
    return FC_OK;
}

static fc_status follow_since(fc_updates *updates, fc_step_counter *counter, uint64_t before,
                              bool *is_news_out)
{
    const size_t at = place_of(updates, counter);
    fc_followed *place;

    *is_news_out = at == updates->n_followed || updates->followed[at].counter != counter;
    if (!*is_news_out) {
        place = &updates->followed[at];
        place->before = before < place->before ? before : place->before;
        return FC_OK;
    }
    FC_TRY(make_room(updates));
    place = &updates->followed[at];
    memmove(place + 1, place, (updates->n_followed - at) * sizeof(*place));
    fc_step_counter_retain(counter);
    *place = (fc_followed){counter, before};
    updates->n_followed++;
    return FC_OK;
}

fc_status fc_updates_follow(fc_updates *updates, fc_step_counter *counter, bool *is_news_out)
{
    return follow_since(updates, counter, counter->n, is_news_out);
}

void fc_updates_load(fc_updates *updates)
{
    updates->n_loads++;
}

uint64_t fc_updates_count(const fc_updates *updates)
{
    uint64_t n = updates->n_loads;

    for (size_t i = 0; i < updates->n_followed; i++) {
        n += updates->followed[i].counter->n - updates->followed[i].before;
    }
    return n;
}

fc_status fc_updates_add(fc_updates *updates, const fc_updates *more)
{
    bool is_news;

    for (size_t i = 0; i < more->n_followed; i++) {
        FC_TRY(
            follow_since(updates, more->followed[i].counter, more->followed[i].before, &is_news));
    }
    updates->n_loads += more->n_loads;
    return FC_OK;
}

void fc_updates_clear(fc_updates *updates)
{
    for (size_t i = 0; i < updates->n_followed; i++) {
        fc_step_counter_release(updates->followed[i].counter);
    }
    fc_free(updates->followed);
    *updates = (fc_updates){0};
}
