/* Memory of simulated devices, who touched which bytes of it, and the reports of mistakes. */
#include "device/sim/sim_private.h"

#include "base/alloc.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define POISON 0xff /* NaN in every floating type */

void fc_sim_report(fc_sim *sim, const char *format, ...)
{
    int index = sim->n_faults++;
    va_list args;

    if (index >= FC_SIM_FAULTS_KEPT) {
        return;
    }
    va_start(args, format);
    (void)vsnprintf(sim->faults[index], sizeof(sim->faults[index]), format, args);
    va_end(args);
}

static const char *keep_text(fc_sim *sim, const char *text)
{
    size_t bytes = strlen(text) + 1;
    fc_sim_text *t;

    for (t = sim->texts; t != NULL; t = t->next) {
        if (strcmp(t->text, text) == 0) {
            return t->text;
        }
    }
    t = fc_alloc(1, sizeof(*t) + bytes);
    if (t == NULL) {
        return "(no memory for its name)";
    }
    memcpy(t->text, text, bytes);
    t->next = sim->texts;
    sim->texts = t;
    return t->text;
}

fc_label fc_sim_keep(fc_device *device, fc_label label)
{
    fc_sim *sim = ((fc_sim_rank *)device)->sim;

    return (fc_label){keep_text(sim, label.unit), keep_text(sim, label.what), 0};
}

int fc_sim_faults(const fc_sim *sim)
{
    return sim->n_faults;
}

const char *fc_sim_fault(const fc_sim *sim, int index)
{
    return index < sim->n_faults && index < FC_SIM_FAULTS_KEPT ? sim->faults[index] : "";
}

size_t fc_sim_bytes(const fc_device *device)
{
    return ((const fc_sim_rank *)device)->bytes;
}

size_t fc_sim_peak_bytes(const fc_device *device)
{
    return ((const fc_sim_rank *)device)->peak_bytes;
}

/* ---- blocks ---- */

/* The first block that begins after `at`. */
static size_t upper_bound(const fc_sim_rank *device, const char *at)
{
    size_t low = 0, high = device->n_blocks;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (device->blocks[middle]->memory <= at) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

fc_sim_block *fc_sim_block_at(const fc_sim_rank *device, const void *at)
{
    size_t index = upper_bound(device, at);
    fc_sim_block *block = index > 0 ? device->blocks[index - 1] : NULL;

    return block != NULL && (const char *)at < block->memory + block->bytes ? block : NULL;
}

/* `*items` gets room for one more. */
static fc_status grow(void **items, size_t count, size_t *capacity, size_t item_bytes)
{
    size_t wanted = *capacity == 0 ? 16 : *capacity * 2;
    void *more;

    if (count < *capacity) {
        return FC_OK;
    }
    more = fc_alloc(wanted, item_bytes);
    if (more == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: %zu entries", wanted);
    }
    if (count > 0) {
        memcpy(more, *items, count * item_bytes);
    }
    fc_free(*items);
    *items = more;
    *capacity = wanted;
    return FC_OK;
}

static fc_status block_create(fc_sim_rank *device, size_t bytes, fc_sim_block **out)
{
    fc_sim_block *block = fc_alloc(1, sizeof(*block));
    void *blocks = device->blocks;
    fc_status st;
    size_t index;

    if (block == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: block");
    }
    block->bytes = bytes;
    block->memory = fc_alloc(1, bytes);
    if (block->memory == NULL) {
        st = fc_fail(FC_ERR_NOMEM, "simulated device %d: %zu bytes", device->rank, bytes);
        goto free_block;
    }
    fc_sim_poison(block->memory, bytes);
    st = grow(&blocks, device->n_blocks, &device->capacity, sizeof(fc_sim_block *));
    if (st != FC_OK) {
        goto free_memory;
    }
    device->blocks = blocks;
    index = upper_bound(device, block->memory);
    memmove(&device->blocks[index + 1], &device->blocks[index],
            (device->n_blocks - index) * sizeof(fc_sim_block *));
    device->blocks[index] = block;
    device->n_blocks++;
    *out = block;
    return FC_OK;

free_memory:
    fc_free(block->memory);
free_block:
    fc_free(block);
    return st;
}

fc_status fc_sim_block_take(fc_stream *stream, fc_label label, size_t bytes, void **out)
{
    fc_sim_rank *device = stream->device;
    fc_sim_block *block = NULL;
    size_t i, rounded = fc_round_up(bytes ? bytes : 1, FC_ALIGN);

    for (i = 0; i < device->n_blocks && block == NULL; i++) {
        fc_sim_block *b = device->blocks[i];

        block = !b->is_live && b->bytes == rounded && b->stream == stream ? b : NULL;
    }
    if (block == NULL) {
        FC_TRY(block_create(device, rounded, &block));
    }
    block->label = label;
    block->stream = stream;
    block->is_live = true;
    fc_sim_tick(stream);
    fc_sim_touch(stream, (fc_label){label.unit, "allocation", 0},
                 (fc_sim_range){block->memory, rounded, true});
    if (stream->index != FC_SIM_HOST) {
        device->bytes += rounded;
    }
    device->peak_bytes = device->bytes > device->peak_bytes ? device->bytes : device->peak_bytes;
    *out = block->memory;
    return FC_OK;
}

void fc_sim_block_give(fc_sim_block *block)
{
    fc_stream *stream = block->stream;

    fc_sim_tick(stream);
    fc_sim_touch(stream, (fc_label){block->label.unit, "free", 0},
                 (fc_sim_range){block->memory, block->bytes, true});
    block->is_live = false;
    if (stream->index != FC_SIM_HOST) {
        stream->device->bytes -= block->bytes;
    }
}

void fc_sim_poison(void *memory, size_t bytes)
{
    memset(memory, POISON, bytes);
}

void fc_sim_blocks_destroy(fc_sim_rank *device)
{
    size_t i;

    for (i = 0; i < device->n_blocks; i++) {
        fc_free(device->blocks[i]->memory);
        fc_free(device->blocks[i]->accesses);
        fc_free(device->blocks[i]);
    }
    fc_free(device->blocks);
}

/* ---- accesses ---- */

static void report_race(const fc_stream *stream, const fc_sim_block *block,
                        const fc_sim_access *old, const fc_sim_access *new)
{
    const fc_sim_rank *device = stream->device;

    fc_sim_report(device->sim,
                  "race on rank %d in '%s' of '%s' (%zu bytes): '%s' of '%s' on stream '%s' %s"
                  " bytes %zu to %zu, then '%s' of '%s' on stream '%s' %s bytes %zu to %zu, and"
                  " nothing makes the second wait for the first",
                  device->rank, block->label.what, block->label.unit, block->bytes, old->label.what,
                  old->label.unit, device->streams[old->stream]->name,
                  old->writes ? "writes" : "reads", old->begin, old->end, new->label.what,
                  new->label.unit, stream->name, new->writes ? "writes" : "reads", new->begin,
                  new->end);
}

/* Whoever comes after `new` also comes after `old`, and conflicts with `new` where with `old`. */
static bool stands_for(const fc_sim_access *new, const fc_sim_access *old)
{
    return new->begin <= old->begin && old->end <= new->end && (new->writes || !old->writes);
}

void fc_sim_touch(fc_stream *stream, fc_label label, fc_sim_range range)
{
    fc_sim_rank *device = stream->device;
    fc_sim_block *block = fc_sim_block_at(device, range.at);
    fc_sim_access new = {.stream = stream->index, .writes = range.writes, .label = label};
    size_t i, n_kept = 0;
    void *accesses;

    if (range.bytes == 0) {
        return;
    }
    if (block == NULL || !block->is_live ||
        (size_t)((const char *)range.at - block->memory) + range.bytes > block->bytes) {
        fc_sim_report(device->sim, "rank %d: '%s' of '%s' on stream '%s' %s %zu bytes at %p, %s%s",
                      device->rank, label.what, label.unit, stream->name,
                      range.writes ? "writes" : "reads", range.bytes, range.at,
                      block == NULL    ? "where nothing is allocated"
                      : block->is_live ? "which reach past the end of "
                                       : "which were freed as ",
                      block == NULL ? "" : block->label.what);
        return;
    }
    new.begin = (size_t)((const char *)range.at - block->memory);
    new.end = new.begin + range.bytes;
    new.tick = stream->clock.seen[stream->index];
    for (i = 0; i < block->n_accesses; i++) {
        const fc_sim_access *old = &block->accesses[i];
        bool is_before = stream->clock.seen[old->stream] >= old->tick;

        if (!is_before && old->begin < new.end && new.begin < old->end &&
            (old->writes || new.writes)) {
            report_race(stream, block, old, &new);
        }
        if (!is_before || !stands_for(&new, old)) {
            block->accesses[n_kept++] = *old;
        }
    }
    block->n_accesses = n_kept;
    accesses = block->accesses;
    if (grow(&accesses, n_kept, &block->capacity, sizeof(fc_sim_access)) != FC_OK) {
        fc_sim_report(device->sim, "%s", fc_last_message());
        return;
    }
    block->accesses = accesses;
    block->accesses[block->n_accesses++] = new;
}

void fc_sim_host_access(fc_device *device, fc_label label, fc_sim_range range)
{
    fc_stream *host = ((fc_sim_rank *)device)->streams[FC_SIM_HOST];

    fc_sim_pause((fc_sim_rank *)device);
    fc_sim_tick(host);
    fc_sim_touch(host, fc_sim_keep(device, label), range);
}
