/* The board: a page per rank of this host, found through the exchange of offers.
 *
 * Two exchanges. Each rank offers its process and its page; all map the pages they can reach, then
 * tell how that went. A page has one writer. Deeds lie in a ring, each behind its sequence: zero
 * while it is written, so that a reader knows when it has read something else.
 */
#include "transport/nccl_board.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "transport/process.h"
#include "transport/shm_impl.h"
#include "transport/shm_segment.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define RING 64 /* how far ranks may be apart for their calls to be compared */
#define HOST_BYTES 40
#define GRACE_NS (FC_NS_PER_S / 2)

enum {
    GOES_ON,
    WRITES_WHY,
    GAVE_UP,
    LEFT
};

#define DEED_WORDS (sizeof(fc_nccl_deed) / sizeof(uint64_t))

typedef struct board_slot {
    _Atomic uint64_t sequence;
    _Atomic uint64_t words[DEED_WORDS];
} board_slot;

static_assert(sizeof(fc_nccl_deed) == DEED_WORDS * sizeof(uint64_t), "copied by words");

typedef struct board_page {
    _Atomic uint32_t state;
    int32_t status;
    char text[FC_MESSAGE_BYTES];
    _Atomic uint64_t last[FC_NCCL_COMMS];
    board_slot ring[FC_NCCL_COMMS][RING];
} board_page;

typedef struct board_peer {
    board_page *page; /* NULL: not watched */
    fc_process process;
    _Atomic int64_t gone_ns; /* when that was seen first; 0: it lives */
} board_peer;

struct fc_nccl_board {
    const fc_transport *base; /* borrowed */
    board_peer *peers;        /* n_ranks; the own one has the own page and no process */
};

typedef struct board_offer {
    fc_shm_outcome outcome;
    char host[HOST_BYTES]; /* empty: unknown */
    fc_process_id process;
    fc_segment_id page;
    fc_nccl_id brought[FC_NCCL_COMMS];
} board_offer;

/* The running kernel's own name, which containers of a host share; their process tables they do
 * not, and those are compared by number. */
static void read_host(char *out)
{
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");

    memset(out, 0, HOST_BYTES);
    if (file != NULL) {
        out[fread(out, 1, HOST_BYTES - 1, file)] = '\0';
        (void)fclose(file);
    }
}

static bool is_same_host(const board_offer *a, const board_offer *b)
{
    return a->host[0] != '\0' && memcmp(a->host, b->host, HOST_BYTES) == 0 &&
           a->process.pid_namespace == b->process.pid_namespace;
}

/* The own page, mapped; its descriptor is in the offer. */
static fc_status make_page(fc_nccl_board *board, board_offer *offer)
{
    char *memory;

    FC_TRY(fc_process_self(&offer->process));
    FC_TRY(fc_segment_create("board of NCCL's ranks", sizeof(board_page), 0, 1, &offer->page));
    FC_TRY(fc_segment_map(offer->page.fd, sizeof(board_page), 0, false, &memory));
    board->peers[board->base->rank].page = (board_page *)(void *)memory;
    return FC_OK;
}

/* A peer that cannot be seen is not watched; only a lack of descriptors or memory is a failure. */
static fc_status watch(board_peer *peer, const board_offer *offer)
{
    char *memory;
    fc_status st = fc_process_open(&offer->process, &peer->process);
    int fd;

    if (st == FC_ERR_UNSUPPORTED) {
        return FC_OK;
    }
    FC_TRY(st);
    st = fc_segment_open(&offer->page, &fd);
    if (st == FC_OK) {
        st = fc_segment_map(fd, sizeof(board_page), 0, false, &memory);
        fc_segment_close(fd);
    }
    if (st != FC_OK) {
        fc_process_close(&peer->process);
        return st == FC_ERR_UNSUPPORTED ? FC_OK : st;
    }
    peer->page = (board_page *)(void *)memory;
    return FC_OK;
}

static fc_status watch_all(fc_nccl_board *board, const board_offer *offers)
{
    const fc_transport *base = board->base;

    for (int r = 0; r < base->n_ranks; r++) {
        if (r != base->rank && is_same_host(&offers[r], &offers[base->rank])) {
            FC_TRY(watch(&board->peers[r], &offers[r]));
        }
    }
    return FC_OK;
}

static fc_status exchange(fc_transport *base, const char *what, const void *mine, size_t bytes,
                          void *all_out)
{
    if (base->host.exchange == NULL) { /* one rank */
        memcpy(all_out, mine, bytes);
        return FC_OK;
    }
    return base->host.exchange(base->host.context, what, mine, bytes, all_out);
}

/* Every rank walks through both exchanges whatever happened to it, so that none waits for another.
 */
static fc_status join(fc_nccl_board *board, fc_transport *base, const board_offer *mine,
                      board_offer *offers, fc_shm_outcome *outcomes)
{
    fc_shm_outcome outcome;

    FC_TRY(exchange(base, "nccl offer", mine, sizeof(*mine), offers));
    FC_TRY(fc_shm_outcome_agree(base, "NCCL", offers, sizeof(*offers)));
    fc_shm_outcome_set(&outcome, base, watch_all(board, offers));
    FC_TRY(exchange(base, "nccl board", &outcome, sizeof(outcome), outcomes));
    return fc_shm_outcome_agree(base, "NCCL", outcomes, sizeof(*outcomes));
}

static fc_status alloc_board(fc_transport *base, fc_nccl_board **out)
{
    fc_nccl_board *board = fc_alloc(1, sizeof(*board));

    if (board == NULL) {
        return fc_fail(FC_ERR_NOMEM, "board of NCCL's ranks");
    }
    board->base = base;
    board->peers = fc_alloc((size_t)base->n_ranks, sizeof(*board->peers));
    if (board->peers == NULL) {
        fc_free(board);
        return fc_fail(FC_ERR_NOMEM, "board of %d ranks", base->n_ranks);
    }
    for (int r = 0; r < base->n_ranks; r++) {
        board->peers[r].process.pidfd = -1;
    }
    *out = board;
    return FC_OK;
}

static fc_status offer_and_join(fc_nccl_board *board, fc_transport *base, fc_status so_far,
                                const fc_nccl_id *mine, fc_nccl_id *all_out)
{
    size_t n = (size_t)base->n_ranks;
    board_offer *offers = fc_alloc(n, sizeof(*offers));
    fc_shm_outcome *outcomes = fc_alloc(n, sizeof(*outcomes));
    board_offer offer;
    fc_status st = so_far;

    memset(&offer, 0, sizeof(offer));
    offer.page.fd = -1;
    if (offers == NULL || outcomes == NULL) {
        /* Not agreed upon: without them this rank could not even tell of a failure. */
        st = fc_fail(FC_ERR_NOMEM, "board of %d ranks", base->n_ranks);
    } else {
        if (st == FC_OK) {
            st = make_page(board, &offer);
        }
        fc_shm_outcome_set(&offer.outcome, base, st);
        read_host(offer.host);
        memcpy(offer.brought, mine, sizeof(offer.brought));
        st = join(board, base, &offer, offers, outcomes);
        fc_segment_close(offer.page.fd);
        for (size_t r = 0; st == FC_OK && r < n; r++) {
            memcpy(all_out + r * FC_NCCL_COMMS, offers[r].brought, sizeof(offer.brought));
        }
    }
    fc_free(outcomes);
    fc_free(offers);
    return st;
}

fc_status fc_nccl_board_create(fc_transport *base, fc_status so_far, const fc_nccl_id *mine,
                               fc_nccl_id *all_out, fc_nccl_board **out)
{
    fc_nccl_board *board = NULL;
    fc_status st;

    FC_TRY(alloc_board(base, &board));
    st = offer_and_join(board, base, so_far, mine, all_out);
    if (st != FC_OK) {
        fc_nccl_board_destroy(board);
        return st;
    }
    *out = board;
    return FC_OK;
}

void fc_nccl_board_destroy(fc_nccl_board *board)
{
    if (board == NULL) {
        return;
    }
    for (int r = 0; r < board->base->n_ranks; r++) {
        fc_process_close(&board->peers[r].process);
        fc_segment_unmap((char *)board->peers[r].page, sizeof(board_page));
    }
    fc_free(board->peers);
    fc_free(board);
}

int fc_nccl_board_n_watched(const fc_nccl_board *board)
{
    int n = 0;

    for (int r = 0; r < board->base->n_ranks; r++) {
        n += r != board->base->rank && board->peers[r].page != NULL;
    }
    return n;
}

/* ---- deeds ---- */

static void describe(const fc_nccl_deed *deed, char *out, size_t bytes)
{
    (void)snprintf(out, bytes, "%.*s of '%.*s' (%llu bytes)", (int)sizeof(deed->op) - 1, deed->op,
                   FC_NCCL_UNIT_BYTES - 1, deed->unit, (unsigned long long)deed->bytes);
}

/* False: the page does not hold it (any more). Words are acquired, so that the sequence is read
 * again after them. */
static bool read_deed(board_page *page, int comm, uint64_t sequence, fc_nccl_deed *out)
{
    board_slot *slot = &page->ring[comm][sequence % RING];
    uint64_t words[DEED_WORDS];

    if (atomic_load_explicit(&slot->sequence, memory_order_seq_cst) != sequence) {
        return false;
    }
    for (size_t i = 0; i < DEED_WORDS; i++) {
        words[i] = atomic_load_explicit(&slot->words[i], memory_order_acquire);
    }
    memcpy(out, words, sizeof(words));
    return atomic_load_explicit(&slot->sequence, memory_order_relaxed) == sequence;
}

/* Of two ranks that do different things at least one sees the other's: each writes its sequence
 * first, then reads, in the one order of sequentially consistent accesses. */
static void write_deed(board_page *page, int comm, const fc_nccl_deed *deed)
{
    board_slot *slot = &page->ring[comm][deed->sequence % RING];
    uint64_t words[DEED_WORDS];

    memcpy(words, deed, sizeof(words));
    atomic_store_explicit(&slot->sequence, 0, memory_order_relaxed);
    for (size_t i = 0; i < DEED_WORDS; i++) {
        atomic_store_explicit(&slot->words[i], words[i], memory_order_release);
    }
    atomic_store_explicit(&page->last[comm], deed->sequence, memory_order_release);
    atomic_store_explicit(&slot->sequence, deed->sequence, memory_order_seq_cst);
}

static bool is_alike(const fc_nccl_deed *a, const fc_nccl_deed *b)
{
    return a->bytes == b->bytes && a->form == b->form &&
           strncmp(a->op, b->op, sizeof(a->op)) == 0 &&
           strncmp(a->unit, b->unit, sizeof(a->unit)) == 0;
}

static bool is_same(const fc_nccl_deed *a, const fc_nccl_deed *b)
{
    return is_alike(a, b) && a->detail == b->detail;
}

#define OTHER_PARAMETERS                                                                           \
    ". They have gradients of different parameters: call set_reduce_scatter_unused_params(True), " \
    "or give each loss a part of all"

fc_status fc_nccl_board_post(fc_nccl_board *board, int comm, const fc_nccl_deed *deed)
{
    const fc_transport *base = board->base;
    fc_nccl_deed theirs;
    char my_text[160], their_text[160];

    write_deed(board->peers[base->rank].page, comm, deed);
    for (int r = 0; r < base->n_ranks; r++) {
        board_page *page = board->peers[r].page;

        if (page != NULL && atomic_load_explicit(&page->state, memory_order_acquire) == GAVE_UP) {
            return FC_AGAIN;
        }
        if (r == base->rank || page == NULL || !read_deed(page, comm, deed->sequence, &theirs) ||
            is_same(deed, &theirs)) {
            continue;
        }
        describe(deed, my_text, sizeof(my_text));
        describe(&theirs, their_text, sizeof(their_text));
        return fc_fail(FC_ERR_MISMATCH,
                       "ranks of process group %s call different collectives in place %llu: rank %d"
                       " calls %s, rank %d calls %s%s",
                       base->name, (unsigned long long)deed->sequence,
                       base->global_ranks[base->rank], my_text, base->global_ranks[r], their_text,
                       is_alike(deed, &theirs) ? OTHER_PARAMETERS : "");
    }
    return FC_OK;
}

bool fc_nccl_board_own(const fc_nccl_board *board, int comm, fc_nccl_deed *out)
{
    board_page *page = board->peers[board->base->rank].page;
    uint64_t last = atomic_load_explicit(&page->last[comm], memory_order_acquire);

    return last != 0 && read_deed(page, comm, last, out);
}

/* What rank r did last in `comm`. */
static void tell_last(const fc_nccl_board *board, int r, int comm, char *out, size_t bytes)
{
    board_page *page = board->peers[r].page;
    uint64_t last = atomic_load_explicit(&page->last[comm], memory_order_acquire);
    fc_nccl_deed deed;
    char what[160];

    if (last == 0 || !read_deed(page, comm, last, &deed)) {
        (void)snprintf(out, bytes, "rank %d has called none", board->base->global_ranks[r]);
        return;
    }
    describe(&deed, what, sizeof(what));
    (void)snprintf(out, bytes, "rank %d called %llu, last %s", board->base->global_ranks[r],
                   (unsigned long long)last, what);
}

bool fc_nccl_board_tell(const fc_nccl_board *board, int comm, uint64_t sequence, char *out,
                        size_t bytes)
{
    const fc_transport *base = board->base;
    int n_behind = 0, n_unseen = 0;
    size_t used = 0;
    char one[256];

    out[0] = '\0';
    for (int r = 0; r < base->n_ranks; r++) {
        const board_page *page = board->peers[r].page;

        if (page == NULL) {
            n_unseen++;
        } else if (r != base->rank &&
                   atomic_load_explicit(&page->last[comm], memory_order_acquire) < sequence) {
            tell_last(board, r, comm, one, sizeof(one));
            used = strlen(out);
            (void)snprintf(out + used, bytes - used, "%s%s", n_behind++ > 0 ? "; " : "", one);
        }
    }
    used = strlen(out);
    if (n_behind == 0) {
        (void)snprintf(out + used, bytes - used, "no rank that can be seen from here is behind");
        used = strlen(out);
    }
    if (n_unseen > 0) {
        (void)snprintf(out + used, bytes - used, "; %d ranks of other hosts cannot be seen",
                       n_unseen);
    }
    return n_behind > 0;
}

/* ---- life and death ---- */

/* Whether this rank has called what the owner of the page has not. */
static bool is_missed(const fc_nccl_board *board, const board_page *page)
{
    const board_page *own = board->peers[board->base->rank].page;

    for (int c = 0; c < FC_NCCL_COMMS; c++) {
        if (atomic_load_explicit(&page->last[c], memory_order_acquire) <
            atomic_load_explicit(&own->last[c], memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

/* What a failure of one rank means to the others. */
static fc_status status_for_peers(int32_t status)
{
    return status == FC_ERR_TIMEOUT || status == FC_ERR_MISMATCH ? (fc_status)status : FC_ERR_PEER;
}

/* Whether a process that is gone will be missed: one that had called everything may have ended its
 * program while the last of it was on its way here. */
static bool is_lost(const fc_nccl_board *board, board_peer *peer)
{
    int64_t now_ns = fc_now_ns();

    int64_t gone_ns = atomic_load_explicit(&peer->gone_ns, memory_order_relaxed);

    if (gone_ns == 0 && fc_process_is_alive(&peer->process)) {
        return false;
    }
    if (gone_ns == 0) {
        gone_ns = now_ns;
        atomic_store_explicit(&peer->gone_ns, gone_ns, memory_order_relaxed);
    }
    return is_missed(board, peer->page) || now_ns - gone_ns >= GRACE_NS;
}

static fc_status look_at(const fc_nccl_board *board, int r)
{
    board_peer *peer = &board->peers[r];
    int rank = board->base->global_ranks[r];
    uint32_t state = atomic_load_explicit(&peer->page->state, memory_order_acquire);

    if (state == GAVE_UP) {
        return fc_fail(status_for_peers(peer->page->status), "rank %d failed: %.*s", rank,
                       (int)sizeof(peer->page->text) - 64, peer->page->text);
    }
    if (state == LEFT) {
        return is_missed(board, peer->page)
                   ? fc_fail(FC_ERR_PEER, "rank %d has left the group", rank)
                   : FC_OK;
    }
    return is_lost(board, peer) ? fc_fail(FC_ERR_PEER, "rank %d (pid %d) " FC_PROCESS_LOST, rank,
                                          (int)peer->process.id.pid)
                                : FC_OK;
}

fc_status fc_nccl_board_look(fc_nccl_board *board)
{
    for (int r = 0; r < board->base->n_ranks; r++) {
        if (r != board->base->rank && board->peers[r].page != NULL) {
            FC_TRY(look_at(board, r));
        }
    }
    return FC_OK;
}

void fc_nccl_board_give_up(fc_nccl_board *board, fc_status status, const char *text)
{
    board_page *page = board->peers[board->base->rank].page;
    uint32_t state = GOES_ON;

    if (atomic_compare_exchange_strong(&page->state, &state, WRITES_WHY)) {
        page->status = (int32_t)status;
        (void)snprintf(page->text, sizeof(page->text), "%s", text);
        atomic_store_explicit(&page->state, GAVE_UP, memory_order_release);
    }
}

void fc_nccl_board_leave(fc_nccl_board *board)
{
    uint32_t state = GOES_ON;

    (void)atomic_compare_exchange_strong(&board->peers[board->base->rank].page->state, &state,
                                         LEFT);
}
