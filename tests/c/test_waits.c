/* Collectives of messages for a unit: what is summed and where it goes, what is counted, what is
 * shown meanwhile, and what a failure says. The peer sends what this rank sends. */
#define _GNU_SOURCE

#include "ranks.h"
#include "refused_messages.h"

#include "base/alloc.h"
#include "engine/domain_private.h"
#include "engine/unit.h"
#include "window/window.h"

#include <unistd.h>

#define N_UNITS 2
#define PARTS_BYTES 8192
#define NAME "layers.1" /* of the second unit, which is used */

enum {
    FIRST,  /* float32 */
    SECOND, /* float32 */
    WIDE,   /* float64: a section of its own */
    WIDE_SECOND,
    FROZEN,
    N_PARAMS
};

static const size_t rows[N_PARAMS] = {6, 10, 4, 7, 8};
static int world_size;

/* What the collectives saw. */
#define MAX_CALLS 4
static struct call {
    const char *op;
    size_t numel; /* or bytes */
    fc_dtype dtype;
} calls[MAX_CALLS];
static size_t n_calls;
static fc_status fails_with;
static bool fails_late; /* not as it is announced */

static void see(const char *op, const char *shown_as, size_t numel, fc_dtype dtype)
{
    const fc_window_waiting shown = fc_window_waits();

    CHECK(shown.since_ns != 0);
    CHECK_EQ(shown.rank, FC_WINDOW_ALL);
    CHECK_EQ(shown.op, fc_window_name(shown_as));
    CHECK_EQ(shown.unit, fc_window_name(NAME));
    CHECK_EQ(shown.step, 2);
    CHECK_OR_EXIT(n_calls < MAX_CALLS);
    calls[n_calls++] = (struct call){op, numel, dtype};
    (void)usleep(100); /* so that it takes time */
}

static void check_call(size_t i, const char *op, size_t numel, fc_dtype dtype)
{
    CHECK(i < n_calls);
    CHECK_STR(calls[i].op, op);
    CHECK_EQ(calls[i].numel, numel);
    CHECK_EQ(calls[i].dtype, dtype);
}

static fc_status trouble(void)
{
    return fails_with != FC_OK ? fc_fail(fails_with, "no luck") : FC_OK;
}

static double load(const void *from, size_t i, fc_dtype dtype)
{
    float narrow;
    double wide;

    if (dtype == FC_F64) {
        memcpy(&wide, (const char *)from + i * sizeof(wide), sizeof(wide));
        return wide;
    }
    memcpy(&narrow, (const char *)from + i * sizeof(narrow), sizeof(narrow));
    return (double)narrow;
}

static void store(void *to, size_t i, fc_dtype dtype, double wide)
{
    const float narrow = (float)wide;

    if (dtype == FC_F64) {
        memcpy((char *)to + i * sizeof(wide), &wide, sizeof(wide));
    } else {
        memcpy((char *)to + i * sizeof(narrow), &narrow, sizeof(narrow));
    }
}

static fc_status begin_of(void *context, size_t unit)
{
    (void)context;
    CHECK_EQ(unit, 1);
    CHECK(fc_window_waits().since_ns != 0);
    return fails_late ? FC_OK : trouble();
}

static fc_status all_gather(void *context, void *recv, const void *send, size_t bytes)
{
    (void)context;
    if (bytes == 64) { /* words, in their own collective */
        for (int r = 0; r < world_size; r++) {
            memcpy((char *)recv + (size_t)r * bytes, send, bytes);
        }
        return FC_OK;
    }
    see("all-gather", "all-gather", bytes, FC_RAW1);
    for (int r = 0; r < world_size; r++) {
        memcpy((char *)recv + (size_t)r * bytes, send, bytes);
    }
    return trouble();
}

static fc_status add(void *recv, const void *send, size_t numel, fc_dtype dtype)
{
    for (size_t i = 0; i < numel; i++) { /* the part of rank 0 */
        store(recv, i, dtype, (double)world_size * load(send, i, dtype));
    }
    return trouble();
}

static fc_status reduce_scatter(void *context, void *recv, void *send, size_t numel, fc_dtype dtype)
{
    (void)context;
    see("reduce-scatter", "reduce-scatter", numel, dtype);
    return add(recv, send, numel, dtype);
}

static fc_status all_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    (void)context;
    see("all-reduce", "all-reduce", numel, dtype);
    return add(data, data, numel, dtype);
}

static const void *begun_send;
static size_t begun_bytes;

static fc_status gather_begin(void *context, const void *send, size_t bytes)
{
    (void)context;
    see("begin", "all-gather", bytes, FC_RAW1);
    begun_send = send;
    begun_bytes = bytes;
    return trouble();
}

static fc_status gather_end(void *context, const fc_gathered *to)
{
    (void)context;
    see("end", "all-gather", 0, FC_RAW1);
    for (int r = 0; r < world_size; r++) {
        CHECK_EQ(to->look(to->context, r, begun_send, begun_bytes), FC_OK);
    }
    for (int r = 0; r < world_size; r++) {
        CHECK_EQ(to->take(to->context, r, 0, begun_send, begun_bytes), FC_OK);
    }
    return trouble();
}

static fc_status sum_begin(void *context, void *send, size_t numel, fc_dtype dtype, bool *is_lent)
{
    (void)context;
    see("begin", "reduce-scatter", numel, dtype);
    begun_send = send;
    begun_bytes = numel;
    *is_lent = true;
    return trouble();
}

static fc_status sum_end(void *context, void *recv)
{
    (void)context;
    see("end", "reduce-scatter", 0, FC_RAW1);
    return add(recv, begun_send, begun_bytes, FC_F32);
}

/* ---- the world ---- */

typedef struct world {
    fc_transport *transport;
    fc_domain *domain;
    fc_unit *unit;
    const fc_layout *layout;
    char part[PARTS_BYTES], parts[PARTS_BYTES];
} world;

static fc_status exchange(void *context, const char *what, const void *mine, size_t bytes,
                          void *out)
{
    (void)context, (void)what, (void)mine, (void)bytes, (void)out;
    return FC_ERR_UNSUPPORTED;
}

/* In a phase of its second step. */
static void make_world(world *w, int n_ranks, bool is_packed, bool is_backward)
{
    static const int global_ranks[] = {10, 11, 12};
    const fc_transport_config config = {.name = "test group",
                                        .n_ranks = n_ranks,
                                        .global_ranks = global_ranks,
                                        .timeout_ns = FC_NS_PER_S,
                                        .host = {.exchange = exchange}};
    fc_message_ops ops = refused_messages;
    fc_param params[N_PARAMS];
    const fc_unit_desc units[N_UNITS] = {{"layers.0", params, 1}, {NAME, params, N_PARAMS}};

    for (size_t i = 0; i < N_PARAMS; i++) {
        const fc_dtype type = i == WIDE || i == WIDE_SECOND ? FC_F64 : FC_F32;

        params[i] = (fc_param){.outer = 1,
                               .rows = rows[i] * (size_t)n_ranks,
                               .inner = 1,
                               .orig = FC_F32,
                               .compute = FC_F32,
                               .reduce = type,
                               .grad = FC_F32,
                               .has_grad = true,
                               .is_packed = is_packed,
                               .trainable = i != FROZEN};
    }
    world_size = n_ranks;
    n_calls = 0;
    fails_with = FC_OK;
    fails_late = false;
    memset(w, 0, sizeof(*w));
    ops.begin = begin_of;
    ops.all_gather = all_gather;
    ops.reduce_scatter = reduce_scatter;
    ops.all_reduce = all_reduce;
    ops.gather_begin = gather_begin;
    ops.gather_end = gather_end;
    ops.sum_begin = sum_begin;
    ops.sum_end = sum_end;
    CHECK_OR_EXIT(fc_callback_create(&config, &ops, &w->transport) == FC_OK);
    CHECK_OR_EXIT(fc_domain_create(w->transport, FC_DOMAIN_SHARD, units, N_UNITS, 0, n_ranks,
                                   &w->domain) == FC_OK);
    fc_domain_link(&w->domain, 1);
    w->unit = fc_domain_unit(w->domain, 1);
    w->layout = fc_unit_layout(w->unit);
    CHECK_OR_EXIT((size_t)n_ranks * w->layout->part_bytes <= PARTS_BYTES);
    for (int step = 1; step <= 2; step++) {
        fc_domain_open(w->domain, (fc_opening){FC_PHASE_FORWARD, 0, FC_UPDATES_UNKNOWN});
    }
    if (is_backward) {
        CHECK_EQ(fc_domain_close(w->domain), FC_OK);
        fc_domain_open(w->domain, (fc_opening){FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN});
    }
}

static void end_world(world *w)
{
    CHECK_EQ(fc_window_waits().since_ns, 0);
    fc_domain_destroy(w->domain);
    fc_transport_destroy(w->transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

static uint64_t n_of(const world *w, fc_wait_kind kind)
{
    return fc_waits_of(w->domain, w->unit, kind).n;
}

static void check_counts(const world *w, uint64_t forward, uint64_t backward, uint64_t reduce)
{
    CHECK_EQ(n_of(w, FC_WAIT_FORWARD), forward);
    CHECK_EQ(n_of(w, FC_WAIT_BACKWARD), backward);
    CHECK_EQ(n_of(w, FC_WAIT_REDUCE), reduce);
    for (fc_wait_kind kind = FC_WAIT_FORWARD; kind < FC_WAIT_KIND_COUNT; kind++) {
        CHECK_EQ(fc_waits_of(w->domain, fc_domain_unit(w->domain, 0), kind).n, 0);
        CHECK_EQ(fc_waits_of(w->domain, NULL, kind).n, 0);
        CHECK_EQ(fc_waits_of(w->domain, w->unit, kind).longest_peer, -1);
    }
}

/* ---- sums ---- */

static double value_of(size_t param, int rank, size_t i)
{
    return (double)(param * 100 + (size_t)rank * 31 + i) + 0.5;
}

/* A parameter's part for a rank, in what all ranks' parts are. */
static char *place_of(const world *w, char *parts, size_t param, int rank, size_t n_ranks)
{
    const fc_param *p = &w->layout->params[param];
    const fc_section *s = fc_layout_section(w->layout, p);

    return parts + n_ranks * s->at + (size_t)rank * s->bytes + (p->part_at - s->at);
}

static void fill(world *w, char *parts, size_t n_ranks)
{
    for (size_t i = 0; i < N_PARAMS; i++) {
        for (size_t r = 0; r < n_ranks; r++) {
            for (size_t k = 0; k < rows[i]; k++) {
                store(place_of(w, parts, i, (int)r, n_ranks), k, w->layout->params[i].reduce,
                      value_of(i, (int)r, k));
            }
        }
    }
}

/* What `times` ranks have sent of it. */
static void check_sum(world *w, size_t param, int times)
{
    const fc_param *p = &w->layout->params[param];

    for (size_t k = 0; k < rows[param]; k++) {
        const double got = load(w->part + p->part_at, k, p->reduce);
        const double wanted = (double)times * value_of(param, 0, k);

        CHECK_MSG(memcmp(&got, &wanted, sizeof(got)) == 0, "param %zu [%zu]: %g, not %g", param, k,
                  got, wanted);
    }
}

static size_t numel_of(const fc_section *s)
{
    return s->bytes / fc_dtype_bytes(s->reduce);
}

/* All sections, and the frozen ones if they take part; or some parameters of a packed unit. */
static void test_sums(int n_ranks, bool is_packed, bool with_frozen, uint64_t mask)
{
    world w;

    for (int is_reduce_scatter = 0; is_reduce_scatter < 2; is_reduce_scatter++) {
        const char *op = is_reduce_scatter != 0 ? "reduce-scatter" : "all-reduce";
        const size_t n_first = (mask >> SECOND & 1) != 0 ? rows[SECOND] : 0;
        const size_t n_wide =
            (mask >> WIDE & 1) * rows[WIDE] + (mask >> WIDE_SECOND & 1) * rows[WIDE_SECOND];
        fc_present present;
        size_t n = 0;

        make_world(&w, n_ranks, is_packed, true);
        present = (fc_present){.layout = w.layout, .frozen = with_frozen};
        present.mask = mask != 0 ? &mask : NULL;
        if (is_reduce_scatter != 0) {
            fill(&w, w.parts, (size_t)n_ranks);
            CHECK_EQ(fc_waits_reduce_scatter(w.unit, w.part, w.parts, &present), FC_OK);
        } else {
            fill(&w, w.part, 1);
            CHECK_EQ(fc_waits_all_reduce(w.unit, w.part, &present), FC_OK);
        }
        if (is_reduce_scatter == 0 && n_ranks == 1 && !is_packed) {
            CHECK_EQ(n_calls, 0);
        } else {
            for (size_t i = 0; i < w.layout->n_sections; i++, n++) {
                const fc_section *s = &w.layout->sections[i];

                const size_t some = s->reduce == FC_F32 ? n_first : n_wide;

                check_call(n, op, some != 0 ? some : numel_of(s), s->reduce);
            }
            for (size_t i = 0; with_frozen && i < w.layout->n_frozen; i++, n++) {
                check_call(n, op, numel_of(&w.layout->frozen[i]), w.layout->frozen[i].reduce);
            }
            CHECK_EQ(n_calls, n);
        }
        check_counts(&w, 0, 0, n_calls);
        for (size_t i = 0; i < N_PARAMS; i++) {
            if ((i != FROZEN || with_frozen) && (mask == 0 || (mask >> i & 1) != 0)) {
                check_sum(&w, i, n_ranks);
            }
        }
        end_world(&w);
    }
}

/* A collective that fails is the last one, and its sections stay as they were. */
static void test_failing_sums(void)
{
    world w;
    fc_present present;

    make_world(&w, 2, false, true);
    present = (fc_present){.layout = w.layout, .frozen = true};
    fails_with = FC_ERR_INTERRUPTED;
    fill(&w, w.parts, 2);
    CHECK_EQ(fc_waits_reduce_scatter(w.unit, w.part, w.parts, &present), FC_ERR_INTERRUPTED);
    CHECK_EQ(fc_waits_all_reduce(w.unit, w.part, &present), FC_ERR_INTERRUPTED);
    CHECK_EQ(n_calls, 0); /* they were not begun */
    check_counts(&w, 0, 0, 0);
    end_world(&w);
}

/* ---- gathers, and what is counted ---- */

typedef struct taken {
    int looks, takes;
    bool failing_take;
    fc_status st; /* of the next look */
} taken;

static fc_status look(void *context, int rank, const char *data, size_t bytes)
{
    taken *t = context;

    CHECK_EQ(rank, t->looks++);
    CHECK_EQ(t->takes, 0);
    CHECK_EQ(bytes, 6);
    CHECK(memcmp(data, "hello", 6) == 0);
    return t->st;
}

static fc_status take(void *context, int rank, size_t at, const char *data, size_t bytes)
{
    taken *t = context;

    CHECK_EQ(t->looks, world_size);
    CHECK_EQ(rank, t->takes++);
    CHECK_EQ(at, 0);
    CHECK_EQ(bytes, 6);
    CHECK(memcmp(data, "hello", 6) == 0);
    return t->failing_take ? fc_fail(FC_ERR_INTERRUPTED, "no luck") : FC_OK;
}

static fc_status gather(world *w, size_t n_units, taken *t)
{
    char recv[64];
    const fc_gathered to = {t, look, take};

    return waits_gather(w->unit, n_units, recv, "hello", 6, &to);
}

static void test_counts(bool is_backward)
{
    uint64_t ns = 0, longest = 0, took_ns = 0;
    fc_waits waits;
    world w;

    make_world(&w, 3, false, is_backward);
    CHECK_EQ(fc_waits_phases(w.domain, false), 2);
    CHECK_EQ(fc_waits_phases(w.domain, true), is_backward);
    for (uint64_t n = 1; n <= 3; n++) {
        taken t = {0};

        const int64_t began_ns = fc_now_ns();

        n_calls = 0;
        CHECK_EQ(gather(&w, 1, &t), FC_OK);
        took_ns += (uint64_t)(fc_now_ns() - began_ns);
        CHECK_EQ(t.takes, 3);
        check_call(0, "all-gather", 6, FC_RAW1);
        check_counts(&w, is_backward ? 0 : n, is_backward ? n : 0, 0);
        waits = fc_waits_of(w.domain, w.unit, is_backward ? FC_WAIT_BACKWARD : FC_WAIT_FORWARD);
        CHECK(waits.ns > ns && waits.ns <= took_ns);
        longest = waits.ns - ns > longest ? waits.ns - ns : longest;
        CHECK_EQ(waits.longest_ns, longest);
        ns = waits.ns;
    }
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(fc_waits_for(w.domain, r), 0);
    }
    fc_waits_reset(w.domain);
    check_counts(&w, 0, 0, 0);
    CHECK_EQ(fc_waits_of(w.domain, w.unit, FC_WAIT_BACKWARD).ns, 0);
    CHECK_EQ(fc_waits_phases(w.domain, false), 0);
    CHECK_EQ(fc_waits_phases(w.domain, true), 0);
    end_world(&w);
}

/* What is begun and ended later counts once, when it ends. */
static void test_begun(void)
{
    static float send[4] = {1, 2, 3, 4};
    float sum[2];
    taken t = {0};
    const fc_gathered to = {&t, look, take};
    bool is_lent = false;
    world w;

    make_world(&w, 2, false, false);
    CHECK_EQ(waits_gather_begin(w.unit, "hello", 6), FC_OK);
    check_call(0, "begin", 6, FC_RAW1);
    CHECK_EQ(fc_window_waits().since_ns, 0);
    check_counts(&w, 0, 0, 0);
    CHECK_EQ(waits_gather_end(w.unit, &to), FC_OK);
    check_call(1, "end", 0, FC_RAW1);
    CHECK_EQ(t.takes, 2);
    check_counts(&w, 1, 0, 0);
    CHECK_EQ(waits_sum_begin(w.unit, send, 2, FC_F32, &is_lent), FC_OK);
    CHECK(is_lent);
    check_call(2, "begin", 2, FC_F32);
    CHECK_EQ(fc_window_waits().since_ns, 0);
    check_counts(&w, 1, 0, 0);
    CHECK_EQ(waits_sum_end(w.unit, sum), FC_OK);
    CHECK(sum[0] == 2 && sum[1] == 4);
    check_counts(&w, 1, 0, 1);
    end_world(&w);
}

/* ---- failures ---- */

#define OF_GROUP                                                                                   \
    "failed on rank 0 of 2. A rank may have skipped the unit or have ended: over a process group " \
    "all ranks call the same units in the same order (set_reduce_scatter_unused_params(True) "     \
    "where they use different parameters of one). The group says"

#define CHECK_FAILS(call, status, text)                                                            \
    do {                                                                                           \
        CHECK_EQ(call, status);                                                                    \
        CHECK_STR(fc_last_message(), text);                                                        \
        CHECK_EQ(fc_window_waits().since_ns, 0);                                                   \
    } while (0)

/* Of what a look at the data says, so that the announcement before it does not fail. */
static void test_failures(void)
{
    static const fc_status told[] = {FC_ERR_PEER, FC_ERR_TIMEOUT, FC_ERR_MISMATCH};
    static float send[4];
    float sum[2];
    bool is_lent;
    taken t = {0};
    const fc_gathered to = {&t, look, take};
    world w;

    make_world(&w, 2, false, false);
    begun_send = send;
    begun_bytes = 2;
    for (size_t i = 0; i < 3; i++) {
        t = (taken){.st = fc_fail(told[i], "no luck")};
        n_calls = 0;
        CHECK_FAILS(gather(&w, 2, &t), told[i], "all-gather of FSDP unit 'layers.1': no luck");
        CHECK_EQ(t.looks, 1);
        fails_with = told[i];
        CHECK_FAILS(waits_sum_end(w.unit, sum), told[i],
                    "reduction of FSDP unit 'layers.1': no luck");
        fails_with = FC_OK;
    }
    check_counts(&w, 3, 0, 3);
    t = (taken){.st = fc_fail(FC_ERR_GROUP, "no luck")};
    n_calls = 0;
    CHECK_FAILS(gather(&w, 1, &t), FC_ERR_GROUP, "all-gather of FSDP unit 'layers.1' " OF_GROUP);
    t.looks = 0;
    CHECK_FAILS(gather(&w, 2, &t), FC_ERR_GROUP,
                "all-gather of FSDP unit 'layers.1', with 1 after it, " OF_GROUP);
    t.looks = 0;
    CHECK_FAILS(gather(&w, 3, &t), FC_ERR_GROUP,
                "all-gather of FSDP unit 'layers.1', with 2 after it, " OF_GROUP);
    t = (taken){.st = fc_fail(FC_ERR_INTERRUPTED, "no luck")};
    CHECK_FAILS(gather(&w, 2, &t), FC_ERR_INTERRUPTED, "no luck");
    n_calls = 0;
    fails_with = FC_ERR_GROUP;
    CHECK_FAILS(waits_sum_end(w.unit, sum), FC_ERR_GROUP,
                "reduction of FSDP unit 'layers.1' " OF_GROUP);
    t = (taken){0};
    begun_send = "hello";
    begun_bytes = 6;
    CHECK_FAILS(waits_gather_end(w.unit, &to), FC_ERR_GROUP,
                "all-gather of FSDP unit 'layers.1' " OF_GROUP);
    n_calls = 0;
    /* Who announces it says why itself, and nothing is begun. */
    CHECK_FAILS(gather(&w, 1, &t), FC_ERR_GROUP, "no luck");
    CHECK_FAILS(waits_gather_begin(w.unit, "hello", 6), FC_ERR_GROUP, "no luck");
    CHECK_FAILS(waits_sum_begin(w.unit, send, 2, FC_F32, &is_lent), FC_ERR_GROUP, "no luck");
    CHECK_FAILS(waits_reduce_scatter(w.unit, 1, sum, send, 2, FC_F32, 0), FC_ERR_GROUP, "no luck");
    CHECK_EQ(n_calls, 0);
    check_counts(&w, 8, 0, 4);
    end_world(&w);
}

/* The collectives themselves, one unit each; what is under way is no failure of the unit's. */
static void test_late_failures(void)
{
    static float send[4];
    float sum[2];
    bool is_lent;
    taken t = {.failing_take = true};
    fc_present present;
    world w;

    make_world(&w, 2, false, false);
    present = (fc_present){.layout = w.layout, .frozen = true};
    CHECK_FAILS(gather(&w, 1, &t), FC_ERR_INTERRUPTED, "no luck");
    CHECK_EQ(t.takes, 1);
    n_calls = 0;
    fails_late = true;
    fails_with = FC_ERR_GROUP;
    t = (taken){0};
    CHECK_FAILS(gather(&w, 1, &t), FC_ERR_GROUP, "all-gather of FSDP unit 'layers.1' " OF_GROUP);
    CHECK_EQ(t.looks, 0);
    CHECK_FAILS(waits_gather_begin(w.unit, "hello", 6), FC_ERR_GROUP,
                "all-gather of FSDP unit 'layers.1' " OF_GROUP);
    CHECK_FAILS(waits_sum_begin(w.unit, send, 2, FC_F32, &is_lent), FC_ERR_GROUP,
                "reduction of FSDP unit 'layers.1' " OF_GROUP);
    n_calls = 0;
    CHECK_FAILS(waits_reduce_scatter(w.unit, 1, sum, send, 2, FC_F32, 0), FC_ERR_GROUP,
                "reduction of FSDP unit 'layers.1' " OF_GROUP);
    CHECK_FAILS(fc_waits_reduce_scatter(w.unit, w.part, w.parts, &present), FC_ERR_GROUP,
                "reduction of FSDP unit 'layers.1' " OF_GROUP);
    CHECK_FAILS(fc_waits_all_reduce(w.unit, w.part, &present), FC_ERR_GROUP,
                "reduction of FSDP unit 'layers.1' " OF_GROUP);
    CHECK_EQ(n_calls, 3); /* the first of several sections is the last one that is tried */
    n_calls = 0;
    fails_with = FC_AGAIN;
    CHECK_EQ(waits_gather_begin(w.unit, "hello", 6), FC_AGAIN);
    CHECK_EQ(waits_sum_begin(w.unit, send, 2, FC_F32, &is_lent), FC_AGAIN);
    end_world(&w);
}

static void test_no_memory(void)
{
    fc_param param = {.outer = 1, .rows = 4, .inner = 1, .orig = FC_F32};
    const fc_unit_desc unit = {"a", &param, 1};
    fc_status st = FC_ERR_NOMEM;
    world w;
    int n = 0;

    make_world(&w, 2, false, false);
    while (st != FC_OK) {
        fc_domain *domain = NULL;

        CHECK_OR_EXIT(n < 100);
        fc_alloc_fail_after(n++);
        st = fc_domain_create(w.transport, FC_DOMAIN_SHARD, &unit, 1, 0, 2, &domain);
        fc_alloc_fail_after(-1);
        CHECK_EQ(st, st == FC_OK ? FC_OK : FC_ERR_NOMEM);
        CHECK_EQ(domain != NULL, st == FC_OK);
        fc_domain_destroy(domain);
    }
    end_world(&w);
}

/* ---- the trace ---- */

static fc_window_event event_of(uint64_t n)
{
    return fc_window_events_[n % FC_WINDOW_EVENTS];
}

static void check_event(uint64_t n, const char *op)
{
    const fc_window_event event = event_of(n);

    CHECK_EQ(event.kind, FC_WINDOW_EVENT_WAIT);
    CHECK_EQ(event.what, fc_window_name(op));
    CHECK_EQ(event.unit, fc_window_name(NAME));
    CHECK_EQ(event.rank, -1);
    CHECK(event.from_ns > 0 && event.value > event.from_ns);
}

static void test_trace(void)
{
    const fc_window_config config = {.run = "a run", .world = 1, .traces = true};
    static float send[4];
    float sum[2];
    taken t = {0};
    uint64_t n;
    world w;

    CHECK_EQ(fc_window_open(&config), FC_OK);
    CHECK_OR_EXIT(fc_window_traces());
    make_world(&w, 2, false, false);
    n = fc_window()->use.n_events;
    CHECK_EQ(gather(&w, 1, &t), FC_OK);
    CHECK_EQ(waits_reduce_scatter(w.unit, 1, sum, send, 2, FC_F32, 0), FC_OK);
    CHECK_EQ(fc_window()->use.n_events, n + 2);
    check_event(n, "all-gather");
    check_event(n + 1, "reduction");
    end_world(&w);
}

int main(void)
{
    for (int n = 1; n <= 3; n++) {
        for (int with_frozen = 0; with_frozen < 2; with_frozen++) {
            test_sums(n, false, with_frozen != 0, 0);
            test_sums(n, true, with_frozen != 0, 0);
        }
        test_sums(n, true, false, 1U << SECOND);
        test_sums(n, true, false, 1U << SECOND | 1U << WIDE);
        test_sums(n, true, false, 1U << SECOND | 1U << WIDE_SECOND);
    }
    test_failing_sums();
    test_counts(false);
    test_counts(true);
    test_begun();
    test_failures();
    test_late_failures();
    test_no_memory();
    test_trace();
    return check_result();
}
