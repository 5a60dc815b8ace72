/* Where posts find room in an arena and its spare one, beside a map of every block. */
#include "check.h"

#include "base/clock.h"
#include "engine/exchange_private.h"

#include <string.h>

#define N_UNITS 3
#define ARENA_BLOCKS 7
#define SPARE_BLOCKS 5
#define N_BLOCKS (ARENA_BLOCKS + SPARE_BLOCKS)
#define RING 6 /* one block each fills neither arena */
#define NOWHERE SIZE_MAX

typedef struct world {
    fc_domain domain;
    fc_unit units[N_UNITS];
    ring_entry ring[RING];
    uint64_t n_posted;
} world;

static size_t bytes_of(size_t blocks)
{
    return blocks * FC_ALIGN;
}

static void set_up(world *w, bool is_spread)
{
    memset(w, 0, sizeof(*w));
    w->domain = (fc_domain){.arena_bytes = bytes_of(ARENA_BLOCKS),
                            .spare_bytes = bytes_of(SPARE_BLOCKS),
                            .ring = w->ring,
                            .ring_capacity = RING,
                            .is_spread = is_spread};
    for (size_t u = 0; u < N_UNITS; u++) {
        w->units[u] = (fc_unit){.domain = &w->domain, .index = u};
    }
}

/* The block that a post of that size would come to; it takes none. */
static size_t room_for(const world *w, size_t blocks)
{
    size_t at = 1;

    if (!arena_find_room(&w->domain, bytes_of(blocks), &at)) {
        return NOWHERE;
    }
    CHECK_EQ(at % FC_ALIGN, 0);
    return at / FC_ALIGN;
}

static void take(world *w, size_t block, size_t blocks)
{
    fc_unit *unit = &w->units[w->n_posted % N_UNITS];

    unit->posted = ++w->n_posted;
    arena_take(unit, bytes_of(block), bytes_of(blocks));
}

static void put(world *w, size_t block, size_t blocks)
{
    CHECK_EQ(room_for(w, blocks), block);
    take(w, block, blocks);
}

/* The oldest post is over. */
static void let_go(world *w)
{
    CHECK(w->domain.oldest < w->domain.newest);
    w->domain.oldest++;
    if (w->domain.oldest == w->domain.newest) {
        w->domain.next_at = 0;
    }
}

/* Behind the newest post, at the begin once that is at the end, never into the oldest. */
static void check_queue(void)
{
    world w;

    set_up(&w, false);
    CHECK_EQ(room_for(&w, ARENA_BLOCKS), 0);
    CHECK_EQ(room_for(&w, ARENA_BLOCKS + 1), NOWHERE);
    put(&w, 0, 3);
    CHECK_EQ(room_for(&w, ARENA_BLOCKS - 2), NOWHERE);
    put(&w, 3, 2);
    put(&w, 5, 2);
    CHECK_EQ(room_for(&w, 1), NOWHERE);
    let_go(&w);
    CHECK_EQ(room_for(&w, 4), NOWHERE);
    put(&w, 0, 2);
    CHECK_EQ(room_for(&w, 2), NOWHERE);
    put(&w, 2, 1);
    CHECK_EQ(room_for(&w, 1), NOWHERE);
    for (int n = 0; n < 3; n++) {
        let_go(&w);
    }
    CHECK_EQ(room_for(&w, 5), NOWHERE);
    put(&w, 3, 4);
    let_go(&w);
    let_go(&w);
    CHECK_EQ(w.domain.newest - w.domain.oldest, 0);
    CHECK_EQ(room_for(&w, ARENA_BLOCKS), 0);
}

/* What a post takes is written down as it is. */
static void check_entries(void)
{
    world w;

    set_up(&w, false);
    for (size_t n = 0; n < RING; n++) {
        const ring_entry *entry = domain_entry(&w.domain, n);

        put(&w, n, 1);
        CHECK_EQ(w.domain.newest, n + 1);
        CHECK_EQ(w.domain.next_at, bytes_of(n + 1));
        CHECK(entry->at == bytes_of(n) && entry->bytes == FC_ALIGN);
        CHECK(entry->unit == n % N_UNITS && entry->tag == n + 1);
    }
    CHECK_EQ(room_for(&w, 1), NOWHERE); /* for want of entries */
    w.domain.is_spread = true;
    CHECK_EQ(room_for(&w, 1), NOWHERE);
    let_go(&w);
    CHECK_EQ(room_for(&w, 1), 0);
    w.domain.is_spread = false;
    CHECK_EQ(room_for(&w, 1), ARENA_BLOCKS - 1);
}

/* The lowest block that a post may begin at, where each lies in one of the arenas. */
static size_t lowest(const world *w, size_t blocks)
{
    bool taken[N_BLOCKS] = {false};

    for (size_t s = w->domain.oldest; s < w->domain.newest; s++) {
        const ring_entry *entry = domain_entry(&w->domain, s);

        for (size_t i = 0; i < entry->bytes / FC_ALIGN; i++) {
            taken[entry->at / FC_ALIGN + i] = true;
        }
    }
    for (size_t at = 0; at + blocks <= N_BLOCKS; at++) {
        bool is_free = at >= ARENA_BLOCKS || at + blocks <= ARENA_BLOCKS;

        for (size_t i = 0; i < blocks; i++) {
            is_free = is_free && !taken[at + i];
        }
        if (is_free) {
            return at;
        }
    }
    return NOWHERE;
}

static bool is_bounded(const world *w, size_t at)
{
    bool is_bounded = at == 0 || at == ARENA_BLOCKS;

    for (size_t s = w->domain.oldest; s < w->domain.newest; s++) {
        const ring_entry *entry = domain_entry(&w->domain, s);

        is_bounded = is_bounded || at == (entry->at + entry->bytes) / FC_ALIGN;
    }
    return is_bounded;
}

/* Posts of all sizes come and go; a place is the lowest there is, and overlaps nothing. */
static void check_between(void)
{
    uint32_t draw = 1;
    size_t n_in_spare = 0, n_before = 0;
    world w;

    set_up(&w, true);
    for (int n = 0; n < 200000; n++) {
        size_t blocks, at;

        draw = draw * 1664525 + 1013904223;
        blocks = 1 + (draw >> 16) % ARENA_BLOCKS;
        if ((draw >> 28) % 3 == 0 && w.domain.oldest < w.domain.newest) {
            let_go(&w);
            continue;
        }
        at = w.domain.newest - w.domain.oldest < RING ? lowest(&w, blocks) : NOWHERE;
        CHECK_OR_EXIT(room_for(&w, blocks) == at);
        if (at == NOWHERE) {
            continue;
        }
        CHECK(is_bounded(&w, at));
        n_in_spare += at >= ARENA_BLOCKS;
        n_before += w.domain.oldest < w.domain.newest &&
                    bytes_of(at) < domain_entry(&w.domain, w.domain.newest - 1)->at;
        take(&w, at, blocks);
    }
    CHECK(n_in_spare > 1000 && n_before > 1000);
}

/* What lies in one of the arenas as a whole. */
static void check_places(void)
{
    world w;

    set_up(&w, false);
    for (size_t at = 0; at <= N_BLOCKS + 2; at++) {
        for (size_t blocks = 0; blocks <= N_BLOCKS + 2; blocks++) {
            const bool is_in_arena = at < ARENA_BLOCKS && at + blocks <= ARENA_BLOCKS;
            const bool is_in_spare = at >= ARENA_BLOCKS && at + blocks <= N_BLOCKS;

            CHECK_EQ(arena_is_place(&w.domain, bytes_of(at), bytes_of(blocks)),
                     is_in_arena || is_in_spare);
        }
    }
    CHECK(!arena_is_place(&w.domain, 0, bytes_of(ARENA_BLOCKS) + 1));
    CHECK(!arena_is_place(&w.domain, bytes_of(ARENA_BLOCKS), bytes_of(SPARE_BLOCKS) + 1));
    CHECK(!arena_is_place(&w.domain, 0, SIZE_MAX));
    CHECK(!arena_is_place(&w.domain, SIZE_MAX, 1));
    CHECK(!arena_is_place(&w.domain, FC_ALIGN, SIZE_MAX));
}

static int64_t patience_of(const fc_domain *domain, int64_t expected)
{
    const int64_t before = fc_now_ns();
    const int64_t until = arena_wait_until_ns(domain);
    const int64_t after = fc_now_ns();

    CHECK(before + expected <= until && until <= after + expected);
    return until;
}

/* A wait is long, short once it was in vain, and longer again each time that it was not. */
static void check_patience(void)
{
    const int64_t longest = 250 * FC_NS_PER_MS;
    world w;

    set_up(&w, false);
    for (int round = 0; round < 2; round++) {
        arena_waited(&w.domain, patience_of(&w.domain, longest));
        CHECK(!w.domain.is_spread);
        arena_waited(&w.domain, fc_now_ns()); /* the end has come */
        CHECK(w.domain.is_spread);
        CHECK_EQ(arena_wait_until_ns(&w.domain), INT64_MAX); /* there is no third arena */
        arena_waited(&w.domain, INT64_MAX);
        CHECK(w.domain.is_spread);
        for (int halvings = 6; halvings >= 0; halvings--) {
            w.domain.is_spread = false;
            (void)patience_of(&w.domain, longest >> halvings);
            arena_waited(&w.domain, INT64_MAX); /* for something else */
            (void)patience_of(&w.domain, longest >> halvings);
            arena_waited(&w.domain, fc_now_ns() + longest);
            CHECK(!w.domain.is_spread);
        }
    }
}

int main(void)
{
    check_queue();
    check_entries();
    check_between();
    check_places();
    check_patience();
    return check_result();
}
