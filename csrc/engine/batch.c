/* One collective for several small units; see [Note: batches]. */
#include "engine/batch.h"

#include "engine/domain_private.h"
#include "engine/unit.h"

#include <string.h>

#define ENTRIES_MAX 256
#define MASK_WORDS_MAX 4 /* of 64 parameters */

/* What a rank says of a unit before its shards. */
typedef struct note {
    uint64_t print; /* of the unit */
    uint64_t limit; /* of batches */
    uint64_t is_observed;
    uint64_t order;    /* that it would follow in this forward */
    uint64_t backward; /* and in the backward behind it */
} note;

typedef struct entry {
    fc_unit *unit;
    size_t at; /* bytes, in every rank's part */
    uint64_t mask[MASK_WORDS_MAX];
} entry;

struct fc_batch {
    fc_domain *domain; /* borrowed; owns the batch unless it is being summed up */
    size_t capacity;   /* bytes of a rank's part */
    char *parts;       /* owned; of all ranks, `capacity` apart, then the sums */
    fc_dtype dtype;
    size_t used; /* of the part */
    size_t n, next;
    entry entries[ENTRIES_MAX];
};

void fc_batch_limit(fc_domain *domain, size_t bytes)
{
    domain->batch_limit = bytes;
}

/* ---- gathers ---- */

static size_t note_bytes(const fc_unit *unit)
{
    return unit->domain->is_packed ? 0 : BATCH_NOTE_BYTES;
}

static size_t rank_bytes(const fc_batch_gather *units, size_t n_units)
{
    size_t bytes = 0;

    for (size_t i = 0; i < n_units; i++) {
        bytes += note_bytes(units[i].unit) + units[i].unit->layout.pack_bytes;
    }
    return bytes;
}

size_t fc_batch_pack_bytes(const fc_batch_gather *units, size_t n_units)
{
    const fc_domain *domain = units[0].unit->domain;
    const size_t n_ranks = waits_takes_gathers(domain) ? 0 : (size_t)domain->n_ranks;

    return (n_ranks + 1) * rank_bytes(units, n_units);
}

static note note_of(const fc_batch_gather *of)
{
    return (note){.print = fc_fingerprint(of->unit->layout.fingerprint, of->unit->index),
                  .limit = of->unit->domain->batch_limit,
                  .is_observed = of->is_observed,
                  .order = order_told(of->unit->domain, false),
                  .backward = order_told(of->unit->domain, true)};
}

/* Writes what this rank sends. */
static void pack_all(const fc_batch_gather *units, size_t n_units, char *pack)
{
    for (size_t i = 0; i < n_units; i++) {
        const note mine = note_of(&units[i]);
        const size_t bytes = note_bytes(units[i].unit);

        if (bytes > 0) {
            memset(pack, 0, bytes);
            memcpy(pack, &mine, sizeof(mine));
        } else {
            memset(pack, 0, units[i].unit->layout.pack_bytes); /* padding is zeros */
        }
        fc_unit_pack(units[i].unit, units[i].shards, pack + bytes);
        pack += bytes + units[i].unit->layout.pack_bytes;
    }
}

/* FC_ERR_MISMATCH unless `rank` gathers the same unit, by the same rules. */
static fc_status check_note(const fc_batch_gather *of, const note *theirs, int rank)
{
    const fc_domain *domain = of->unit->domain;
    const note mine = note_of(of);
    const int here = fc_transport_global_rank(domain->transport, domain->rank);
    const int there = fc_transport_global_rank(domain->transport, rank);

    if (mine.print != theirs->print) {
        return fc_fail(FC_ERR_MISMATCH,
                       "rank %d gathers FSDP unit '%s' and rank %d another one: over a process "
                       "group all ranks call the same units in the same order",
                       here, of->unit->name, there);
    }
    if (mine.limit != theirs->limit) {
        return fc_fail(FC_ERR_MISMATCH,
                       "FSDP_C_BATCH_BYTES and FSDP_C_STRICT must be the same on all ranks: "
                       "batches have up to %llu bytes on rank %d and %llu on rank %d",
                       (unsigned long long)mine.limit, here, (unsigned long long)theirs->limit,
                       there);
    }
    return FC_OK;
}

static void observe(fc_unit *unit, bool is_observed)
{
    unit->domain->n_observed -= unit->is_observed;
    unit->domain->n_observed += is_observed;
    unit->is_observed = is_observed;
}

typedef struct gathering {
    const fc_batch_gather *units;
    size_t n_units;
} gathering;

/* What a rank says of a unit, whose note begins at `unit_at`; of `data`, which begins at `at`. */
static fc_status look_at(const fc_batch_gather *of, int rank, size_t unit_at, size_t at,
                         const char *data, size_t bytes)
{
    fc_unit *unit = of->unit;
    note theirs;

    if (note_bytes(unit) == 0 || unit_at < at || unit_at >= at + bytes) {
        return FC_OK;
    }
    memcpy(&theirs, data + (unit_at - at), sizeof(theirs)); /* pieces hold whole notes */
    FC_TRY(check_note(of, &theirs, rank));
    unit->was_observed = unit->was_observed || theirs.is_observed != 0;
    unit->has_other_order =
        unit->has_other_order || theirs.order != order_told(unit->domain, false);
    unit->has_other_backward =
        unit->has_other_backward || theirs.backward != order_told(unit->domain, true);
    return FC_OK;
}

static fc_status look(void *context, int rank, const char *data, size_t bytes)
{
    const gathering *g = context;
    size_t unit_at = 0;

    for (size_t i = 0; i < g->n_units; i++) {
        FC_TRY(look_at(&g->units[i], rank, unit_at, 0, data, bytes));
        unit_at += note_bytes(g->units[i].unit) + g->units[i].unit->layout.pack_bytes;
    }
    return FC_OK;
}

static void unpack(const fc_batch_gather *of, int rank, size_t pack_at, size_t at, const char *data,
                   size_t bytes)
{
    const size_t end = pack_at + of->unit->layout.pack_bytes;
    const size_t from = at > pack_at ? at : pack_at, to = at + bytes < end ? at + bytes : end;

    if (from < to) {
        fc_unit_unpack(of->unit, rank, from - pack_at, data + (from - at), to - from, of->dst);
    }
}

static fc_status take(void *context, int rank, size_t at, const char *data, size_t bytes)
{
    const gathering *g = context;
    size_t unit_at = 0;

    for (size_t i = 0; i < g->n_units; i++) {
        const fc_batch_gather *of = &g->units[i];
        const size_t pack_at = unit_at + note_bytes(of->unit);

        if (at > 0) { /* later pieces */
            FC_TRY(look_at(of, rank, unit_at, at, data, bytes));
        }
        unpack(of, rank, pack_at, at, data, bytes);
        unit_at = pack_at + of->unit->layout.pack_bytes;
    }
    return FC_OK;
}

static void prepare(const fc_batch_gather *units, size_t n_units, char *pack)
{
    pack_all(units, n_units, pack);
    for (size_t i = 0; i < n_units; i++) {
        units[i].unit->was_observed = units[i].unit->has_other_order = false;
        units[i].unit->has_other_backward = false;
    }
}

static void observe_all(const fc_batch_gather *units, size_t n_units)
{
    for (size_t i = 0; i < n_units; i++) {
        fc_unit *unit = units[i].unit;

        if (note_bytes(unit) > 0) {
            observe(unit, unit->was_observed);
            if (!fc_domain_in_backward(unit->domain)) {
                order_heard(unit->domain, !unit->has_other_order, !unit->has_other_backward);
            }
        }
    }
}

fc_status fc_batch_all_gather(const fc_batch_gather *units, size_t n_units, char *pack)
{
    const size_t bytes = rank_bytes(units, n_units);
    gathering all = {units, n_units};
    const fc_gathered to = {&all, look, take};

    prepare(units, n_units, pack);
    FC_TRY(waits_gather(units[0].unit, n_units, pack + bytes, pack, bytes, &to));
    observe_all(units, n_units);
    return FC_OK;
}

fc_status fc_batch_begin_gather(const fc_batch_gather *unit, char *pack)
{
    prepare(unit, 1, pack);
    return waits_gather_begin(unit->unit, pack, rank_bytes(unit, 1));
}

fc_status fc_batch_end_gather(const fc_batch_gather *unit)
{
    gathering one = {unit, 1};
    const fc_gathered to = {&one, look, take};

    FC_TRY(waits_gather_end(unit->unit, &to));
    observe_all(unit, 1);
    return FC_OK;
}

/* ---- posts ---- */

static bool is_admitted(const fc_unit *unit)
{
    const fc_domain *domain = unit->domain;
    const fc_layout *layout = &unit->layout;
    const size_t bytes = (size_t)domain->n_ranks * layout->trainable_part_bytes;

    return !domain->is_mapped && domain->kind == FC_DOMAIN_SHARD && domain->n_ranks > 1 &&
           layout->n_sections == 1 && bytes <= FC_BATCH_UNIT_BYTES &&
           bytes <= domain->batch_limit && layout->mask_words <= MASK_WORDS_MAX;
}

bool fc_batch_admits(const fc_unit *unit)
{
    return is_admitted(unit) && !unit->is_observed;
}

bool fc_batch_joins(const fc_unit *unit)
{
    const fc_batch *batch = unit->domain->batch;

    return batch != NULL && batch->n > 0 && batch->n < ENTRIES_MAX && fc_batch_admits(unit) &&
           batch->dtype == unit->layout.sections[0].reduce &&
           batch->used + unit->layout.trainable_part_bytes <= batch->capacity;
}

fc_domain *fc_batch_waiting(fc_domain *domain)
{
    fc_domain *d = domain;

    do {
        if (d->batch != NULL && d->batch->n > 0) {
            return d;
        }
        d = d->next;
    } while (d != domain);
    return NULL;
}

static void destroy(fc_batch *batch)
{
    if (batch != NULL) {
        fc_pages_free(FC_FOR_MESSAGES, batch->parts,
                      ((size_t)batch->domain->n_ranks + 1) * batch->capacity);
        fc_free(batch);
    }
}

/* Room for all units that are admitted, or for as many as the limit allows. */
static fc_status make(fc_domain *domain)
{
    fc_batch *batch = fc_alloc(1, sizeof(*batch));
    size_t bytes = 0;

    for (size_t i = 0; i < domain->n_units; i++) {
        bytes += is_admitted(&domain->units[i]) ? domain->units[i].layout.trainable_part_bytes : 0;
    }
    if (batch != NULL) {
        const size_t most = domain->batch_limit / (size_t)domain->n_ranks / FC_ALIGN * FC_ALIGN;

        batch->domain = domain;
        batch->capacity = bytes < most ? bytes : most;
        batch->parts =
            fc_pages_alloc(FC_FOR_MESSAGES, ((size_t)domain->n_ranks + 1) * batch->capacity);
    }
    if (batch == NULL || batch->parts == NULL) {
        fc_free(batch);
        return fc_fail(FC_ERR_NOMEM, "a batch of %zu bytes of gradients", bytes);
    }
    domain->batch = batch;
    return FC_OK;
}

fc_status fc_batch_add(fc_unit *unit, char **parts_out, size_t *pitch_out)
{
    fc_domain *domain = unit->domain;
    fc_batch *batch;
    entry *added;

    if (domain->batch == NULL) {
        FC_TRY(make(domain));
    }
    batch = domain->batch;
    added = &batch->entries[batch->n++];
    *added = (entry){.unit = unit, .at = batch->used};
    batch->dtype = unit->layout.sections[0].reduce;
    batch->used += unit->layout.trainable_part_bytes;
    *parts_out = batch->parts + added->at;
    *pitch_out = batch->capacity;
    for (size_t r = 0; r < (size_t)domain->n_ranks; r++) {
        memset(*parts_out + r * batch->capacity, 0, unit->layout.trainable_part_bytes);
    }
    return FC_OK;
}

static char *sums_of(const fc_batch *batch)
{
    return batch->parts + (size_t)batch->domain->n_ranks * batch->capacity;
}

fc_status fc_batch_reduce(fc_domain *domain, fc_batch **out)
{
    fc_batch *batch = domain->batch;
    fc_status st;

    *out = NULL;
    if (batch == NULL || batch->n == 0) {
        return FC_OK;
    }
    domain->batch = NULL; /* hooks that look at the gradients may post again */
    for (size_t r = 1; r < (size_t)domain->n_ranks; r++) {
        memmove(batch->parts + r * batch->used, batch->parts + r * batch->capacity, batch->used);
    }
    st = waits_reduce_scatter(batch->entries[0].unit, batch->n, sums_of(batch), batch->parts,
                              batch->used / fc_dtype_bytes(batch->dtype), batch->dtype, 0);
    if (st != FC_OK) {
        destroy(batch);
        return st;
    }
    *out = batch;
    return FC_OK;
}

fc_unit *fc_batch_next(fc_batch *batch, fc_source *sum_out)
{
    entry *next;
    const char *sum;

    if (batch->next == batch->n) {
        return NULL;
    }
    next = &batch->entries[batch->next++];
    sum = sums_of(batch) + next->at;
    fc_unit_read_present(next->unit, sum, next->unit->layout.trainable_part_bytes, next->mask);
    *sum_out = (fc_source){sum, next->mask, FC_WIRE_REDUCE, NULL};
    return next->unit;
}

static void empty(fc_batch *batch)
{
    batch->used = batch->n = batch->next = 0;
}

void fc_batch_give_back(fc_batch *batch)
{
    fc_domain *domain = batch->domain;

    if (domain->batch != NULL) {
        destroy(batch);
        return;
    }
    empty(batch);
    domain->batch = batch;
}

void batch_drop(fc_domain *domain)
{
    if (domain->batch != NULL) {
        empty(domain->batch);
    }
}

void batch_trim(fc_domain *domain)
{
    destroy(domain->batch);
    domain->batch = NULL;
}
