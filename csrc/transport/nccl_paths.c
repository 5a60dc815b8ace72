/* Which way a unit is gathered.
 *
 * In symmetric memory where there is some. Otherwise an all-gather per parameter saves the
 * copy-out, and is good as long as the parameters are few and alike: NCCL's own developers advise
 * so, without numbers (see MOST_PARAMS). Everything else is staged.
 */
#include "transport/nccl_private.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

/* First guesses, which no GPU has confirmed: each all-gather of a group costs some fixed work, and
 * the largest decides when the group is done. */
#define MOST_PARAMS 32
#define MOST_SKEW 4     /* the largest over the mean */
#define DIRECT_ALIGN 16 /* what NCCL moves at once */

static const char *text_of(fc_nccl_path path)
{
    static const char *const texts[] = {
#define PATH_TEXT(name, text) text,
        FC_NCCL_PATHS(PATH_TEXT)
#undef PATH_TEXT
    };

    return texts[path];
}

/* Why parameters are not gathered one by one; NULL: they are. */
static const char *why_staged(const fc_nccl_shape *shape)
{
    size_t total = 0, largest = 0, i;

    if (!shape->is_in_order) {
        return "a parameter is not its ranks' parts one after another";
    }
    if (shape->n_params > MOST_PARAMS) {
        return "it has many parameters";
    }
    for (i = 0; i < shape->n_params; i++) {
        if (shape->part_bytes[i] % DIRECT_ALIGN != 0) {
            return "a part is no multiple of 16 bytes";
        }
        total += shape->part_bytes[i];
        largest = shape->part_bytes[i] > largest ? shape->part_bytes[i] : largest;
    }
    return largest * shape->n_params > MOST_SKEW * total ? "its parameters differ much in size"
                                                         : NULL;
}

static fc_nccl_path choose(const fc_nccl_group *group, const fc_nccl_shape *shape, const char **why)
{
    *why = "";
    if (shape->window != NULL) {
        return group->options.by_copy_engines && group->nccl->version >= FC_NCCL_COPY_ENGINES
                   ? FC_NCCL_COPY_ENGINE
                   : FC_NCCL_SYMMETRIC;
    }
    *why = why_staged(shape);
    if (*why == NULL) {
        *why = "";
        return FC_NCCL_DIRECT;
    }
    return FC_NCCL_STAGED;
}

/* The unit's entry, made if it is new. */
static fc_status entry_of(fc_nccl_group *group, const char *unit, fc_nccl_choice **out)
{
    fc_nccl_choice **link = &group->choices;
    size_t bytes = strlen(unit) + 1;

    while (*link != NULL && strcmp((*link)->unit, unit) != 0) {
        link = &(*link)->next;
    }
    if (*link == NULL) {
        fc_nccl_choice *entry = fc_alloc(1, sizeof(*entry));

        if (entry == NULL) {
            return fc_fail(FC_ERR_NOMEM, "the way of unit %s", unit);
        }
        entry->unit = fc_alloc(1, bytes);
        if (entry->unit == NULL) {
            fc_free(entry);
            return fc_fail(FC_ERR_NOMEM, "the way of unit %s", unit);
        }
        memcpy(entry->unit, unit, bytes);
        *link = entry;
    }
    *out = *link;
    return FC_OK;
}

fc_status fc_nccl_choose(fc_device_comm *comm, const char *unit, const fc_nccl_shape *shape,
                         fc_nccl_path *out)
{
    fc_nccl_group *group = ((fc_nccl_comm *)(void *)comm)->group;
    fc_nccl_choice *entry = NULL;
    const char *why;
    fc_nccl_path path = choose(group, shape, &why);

    FC_TRY(entry_of(group, unit, &entry));
    (void)snprintf(entry->why, sizeof(entry->why), "%s%s%s%s", text_of(path),
                   why[0] == '\0' ? "" : " (", why, why[0] == '\0' ? "" : ")");
    *out = path;
    return FC_OK;
}

bool fc_nccl_chosen(const fc_nccl_group *group, size_t number, const char **unit_out,
                    const char **why_out)
{
    const fc_nccl_choice *entry = group->choices;

    while (entry != NULL && number-- > 0) {
        entry = entry->next;
    }
    if (entry != NULL) {
        *unit_out = entry->unit;
        *why_out = entry->why;
    }
    return entry != NULL;
}

void fc_nccl_forget_choices(fc_nccl_group *group)
{
    while (group->choices != NULL) {
        fc_nccl_choice *next = group->choices->next;

        fc_free(group->choices->unit);
        fc_free(group->choices);
        group->choices = next;
    }
}
