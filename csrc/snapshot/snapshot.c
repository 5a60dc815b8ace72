/* The header: what it says, and the word that makes it count. */
#include "snapshot/snapshot.h"

#include "base/alloc.h"
#include "snapshot/snapshot_private.h"

#include <assert.h>
#include <string.h>

#define MAGIC UINT64_C(0x66636e7370686f74)
#define VERSION 1U

typedef struct header {
    uint64_t magic;
    uint64_t version;
    fc_snapshot_facts facts;
    uint64_t data_sum;
    uint64_t index_sum;
    uint64_t commit; /* the sum of what stands before it; 0: nothing counts */
} header;

typedef struct page {
    header header;
    char unused[256 - sizeof(header)];
    uint64_t words[FC_SNAPSHOT_WORDS];
} page;

static_assert(sizeof(header) == FC_SNAPSHOT_HEADER, "travels between hosts");
static_assert(offsetof(page, words) == 256, "read by other processes");
static_assert(sizeof(page) <= FC_SNAPSHOT_TEXT_AT, "the owner's text stands behind it");
static_assert(FC_SUM_ROW == FC_ALIGN, "pieces begin with a row");

static uint64_t sum_of(const header *at)
{
    const size_t bytes = offsetof(header, commit);
    fc_sums sums = {0};

    fc_sums_copy(&sums, NULL, at, bytes, 0, fc_snapshot_rows(bytes));
    return fc_sums_mixed(&sums);
}

size_t fc_snapshot_place(fc_snapshot_piece *pieces, size_t n)
{
    size_t at = 0;

    for (size_t i = 0; i < n; i++) {
        pieces[i].at = at;
        at += fc_round_up(pieces[i].bytes, FC_ALIGN);
    }
    return at;
}

bool fc_snapshot_read(const void *file, size_t file_bytes, fc_snapshot_facts *out)
{
    const header *at = file;
    const uint64_t commit =
        file_bytes < FC_SNAPSHOT_PAGE ? 0 : __atomic_load_n(&at->commit, __ATOMIC_ACQUIRE);
    size_t room = file_bytes - FC_SNAPSHOT_PAGE;

    if (commit == 0 || at->magic != MAGIC || at->version != VERSION || commit != sum_of(at) ||
        at->facts.data_bytes > room || at->facts.index_bytes > room - at->facts.data_bytes) {
        return false;
    }
    *out = at->facts;
    return true;
}

static uint64_t sum_at(const char *memory, size_t bytes)
{
    fc_sums sums = {0};

    fc_sums_copy(&sums, NULL, memory, bytes, 0, fc_snapshot_rows(bytes));
    return fc_sums_mixed(&sums);
}

bool fc_snapshot_is_intact(const void *file, size_t file_bytes)
{
    const header *at = file;
    const char *data = (const char *)file + FC_SNAPSHOT_PAGE;
    fc_snapshot_facts facts;

    return fc_snapshot_read(file, file_bytes, &facts) &&
           sum_at(data + facts.data_bytes, facts.index_bytes) == at->index_sum &&
           sum_at(data, facts.data_bytes) == at->data_sum;
}

void fc_snapshot_clear(void *file)
{
    header *at = file;

    __atomic_store_n(&at->commit, 0, __ATOMIC_SEQ_CST);
    /* Before anything that is written next: what a killed process had written is there in order. */
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

void fc_snapshot_header(const void *file, void *out)
{
    memcpy(out, file, FC_SNAPSHOT_HEADER);
}

bool fc_snapshot_adopt(void *file, size_t file_bytes, const void *given)
{
    header *at = file;
    fc_snapshot_facts facts;
    uint64_t commit;

    if (file_bytes < FC_SNAPSHOT_PAGE) {
        return false;
    }
    fc_snapshot_clear(file);
    memcpy(at, given, offsetof(header, commit));
    memcpy(&commit, (const char *)given + offsetof(header, commit), sizeof(commit));
    __atomic_store_n(&at->commit, commit, __ATOMIC_RELEASE);
    if (!fc_snapshot_read(file, file_bytes, &facts)) {
        fc_snapshot_clear(file);
        return false;
    }
    return true;
}

void fc_snapshot_commit(void *file, const fc_snapshot_facts *facts, const fc_sums *data,
                        const fc_sums *index)
{
    header *at = file;

    at->magic = MAGIC;
    at->version = VERSION;
    at->facts = *facts;
    at->data_sum = fc_sums_mixed(data);
    at->index_sum = fc_sums_mixed(index);
    __atomic_store_n(&at->commit, sum_of(at), __ATOMIC_RELEASE);
}

uint64_t fc_snapshot_word(const void *file, size_t i)
{
    return __atomic_load_n(&((const page *)file)->words[i], __ATOMIC_SEQ_CST);
}

void fc_snapshot_set_word(void *file, size_t i, uint64_t value)
{
    __atomic_store_n(&((page *)file)->words[i], value, __ATOMIC_SEQ_CST);
}
