/* Orders of forward and backward: who followed whom, when they are followed, and what makes ranks
 * forget them; against the contract of order.h. No rank but this one exists. */
#include "ranks.h"
#include "refused_messages.h"

#include "base/alloc.h"
#include "engine/batch.h"
#include "engine/domain_private.h"
#include "engine/order.h"
#include "engine/unit.h"
#include "engine/unsharding_private.h"

#define N_UNITS 5
#define LARGE 3 /* the unit that is too large to come along */
#define LIMIT ((size_t)1 << 20)

static fc_status exchange(void *context, const char *what, const void *mine, size_t bytes,
                          void *all_out)
{
    (void)context, (void)what, (void)mine, (void)bytes, (void)all_out;
    return FC_ERR_UNSUPPORTED;
}

static fc_status gather(void *context, const void *send, size_t bytes, const fc_gathered *to)
{
    (void)context, (void)send, (void)bytes, (void)to;
    return FC_ERR_UNSUPPORTED;
}

static fc_transport *transport;
static fc_domain *domain;

static size_t large_rows = 20000;

static void make_domain(int n_ranks, bool takes_gathers)
{
    static const char *const names[N_UNITS] = {"a", "b", "c", "large", "e"};
    static const int global_ranks[] = {0, 1};
    const fc_transport_config config = {.name = "test group",
                                        .n_ranks = n_ranks,
                                        .global_ranks = global_ranks,
                                        .timeout_ns = FC_NS_PER_S,
                                        .host = {.exchange = exchange}};
    fc_message_ops ops = refused_messages;
    fc_param params[N_UNITS];
    fc_unit_desc units[N_UNITS];

    for (size_t u = 0; u < N_UNITS; u++) {
        params[u] = (fc_param){.outer = 1,
                               .rows = u == LARGE ? large_rows : 8,
                               .inner = 1,
                               .orig = FC_F32,
                               .compute = FC_F32,
                               .reduce = FC_F32,
                               .grad = FC_F32,
                               .has_grad = true,
                               .trainable = true};
        units[u] = (fc_unit_desc){names[u], &params[u], 1};
    }
    ops.gather = takes_gathers ? gather : NULL;
    CHECK_OR_EXIT(fc_callback_create(&config, &ops, &transport) == FC_OK);
    CHECK_OR_EXIT(
        fc_domain_create(transport, FC_DOMAIN_SHARD, units, N_UNITS, 0, n_ranks, &domain) == FC_OK);
    fc_batch_limit(domain, LIMIT);
}

static void end_domain(void)
{
    fc_domain_destroy(domain);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

static fc_unit *unit_of(size_t u)
{
    return fc_domain_unit(domain, u);
}

static void open(fc_phase phase)
{
    fc_domain_open(domain, (fc_opening){phase, 0, FC_UPDATES_UNKNOWN});
}

/* Uses units in an order that is told by their names' places: "0 2 1". */
static void use(const char *places)
{
    for (; *places != '\0'; places++) {
        if (*places != ' ') {
            CHECK_EQ(fc_order_note(unit_of((size_t)(*places - '0'))), FC_OK);
        }
    }
}

/* A forward in which all ranks tell the same of their orders, or not. */
static void forward(bool is_alike, const char *places)
{
    open(FC_PHASE_FORWARD);
    order_heard(domain, is_alike, true);
    use(places);
    CHECK_EQ(fc_domain_close(domain), FC_OK);
}

static void backward(const char *places)
{
    open(FC_PHASE_BACKWARD);
    use(places);
    CHECK_EQ(fc_domain_close(domain), FC_OK);
}

/* Who comes along with a unit. */
static void check_after(size_t u, const char *followers)
{
    fc_order_walk walk = fc_order_after(unit_of(u));
    char found[32] = "";
    const fc_unit *unit;

    while ((unit = fc_order_next(&walk)) != NULL) {
        const size_t used = strlen(found);

        (void)snprintf(found + used, sizeof(found) - used, "%s%c", used > 0 ? " " : "",
                       '0' + (char)unit->index);
    }
    CHECK_STR(found, followers);
}

/* ---- who follows whom ---- */

static void test_forward(void)
{
    make_domain(2, false);
    CHECK(fc_order_is_learnt(domain));
    CHECK_EQ(order_told(domain, false), 0);
    CHECK(!fc_order_is_followed(domain)); /* between phases */
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true); /* none is known yet */
    CHECK(!fc_order_is_followed(domain));
    use("0 2 1 4");
    check_after(0, "");
    CHECK_EQ(fc_domain_close(domain), FC_OK);

    CHECK(fc_order_is_learnt(domain)); /* it is known from the next one on */
    open(FC_PHASE_FORWARD);
    CHECK(!fc_order_is_learnt(domain));
    CHECK(order_told(domain, false) != 0);
    CHECK(!fc_order_is_followed(domain)); /* until all have told it */
    check_after(0, "");
    order_heard(domain, true, true);
    CHECK(fc_order_is_followed(domain));
    order_heard(domain, false, true); /* the first gather decides */
    CHECK(fc_order_is_followed(domain));
    check_after(0, "2 1 4");
    check_after(1, "4");
    check_after(4, "");
    check_after(LARGE, ""); /* who was not used is followed by nobody */
    use("2");
    check_after(0, ""); /* what came before is over, and that use itself */
    check_after(2, "");
    check_after(1, "4");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    CHECK(!fc_order_is_followed(domain));
    end_domain();
}

/* Forward and backward have their own; a unit may come more than once. */
static void test_both(void)
{
    make_domain(2, false);
    forward(true, "0 1 0 2");
    backward("2 1 0");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_after(0, "1 0 2");
    use("0 1");
    check_after(0, "2"); /* the second time */
    use("0");
    check_after(2, "");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    open(FC_PHASE_BACKWARD);
    CHECK(fc_order_is_followed(domain));
    check_after(2, "1 0");
    check_after(1, "0");
    use("1");
    check_after(0, "");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    backward("0 1 2");
    open(FC_PHASE_BACKWARD);
    check_after(0, "1 2"); /* of the last one */
    end_domain();
}

/* A phase in which nothing is used leaves the order before it. */
static void test_empty(void)
{
    make_domain(2, false);
    forward(true, "0 1 2");
    backward("2 1 0");
    forward(true, "");
    backward("");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_after(0, "1 2");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    open(FC_PHASE_BACKWARD);
    check_after(2, "1 0");
    end_domain();
}

static void test_many(void)
{
    make_domain(2, false);
    open(FC_PHASE_FORWARD);
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(fc_order_note(unit_of(i % 7 == 3 ? 1 : 0)), FC_OK);
    }
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    for (int i = 0; i < 98; i++) {
        fc_order_walk walk = fc_order_after(unit_of(i % 7 == 3 ? 1 : 0));

        CHECK(fc_order_next(&walk) == unit_of((i + 1) % 7 == 3 ? 1 : 0));
        CHECK(fc_order_next(&walk) == unit_of((i + 2) % 7 == 3 ? 1 : 0));
        CHECK_EQ(fc_order_note(unit_of(i % 7 == 3 ? 1 : 0)), FC_OK);
    }
    end_domain();
}

static void test_no_memory(void)
{
    make_domain(2, false);
    open(FC_PHASE_FORWARD);
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_order_note(unit_of(0)), FC_ERR_NOMEM);
    CHECK_STR(fc_last_message(), "the order of 6 units");
    fc_alloc_fail_after(-1);
    use("0 1 2 0 1 2");
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_order_note(unit_of(0)), FC_ERR_NOMEM);
    CHECK_STR(fc_last_message(), "the order of 12 units");
    fc_alloc_fail_after(-1);
    use("4");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_after(2, "0 1 2 4");
    end_domain();
}

/* ---- what all ranks have alike ---- */

static uint64_t told_after(const char *places)
{
    uint64_t told;

    make_domain(2, false);
    forward(true, places);
    open(FC_PHASE_FORWARD);
    told = order_told(domain, false);
    end_domain();
    return told;
}

static void test_told(void)
{
    const uint64_t told = told_after("0 1 2");

    CHECK(told != 0);
    CHECK(told == told_after("0 1 2"));
    CHECK(told != told_after("0 2 1"));
    CHECK(told != told_after("0 1"));
    CHECK(told != told_after("0 1 2 2"));
    CHECK_EQ(told_after(""), 0);
    make_domain(2, false);
    forward(true, "0 1");
    fc_batch_limit(domain, 0);
    open(FC_PHASE_FORWARD);
    CHECK_EQ(order_told(domain, false), 0);
    CHECK(!fc_order_is_learnt(domain));
    order_heard(domain, true, true);
    CHECK(!fc_order_is_followed(domain));
    end_domain();
    /* One of them tells another one: nobody follows, until all tell the same. */
    make_domain(2, false);
    forward(true, "0 1");
    open(FC_PHASE_FORWARD);
    order_heard(domain, false, true);
    order_heard(domain, true, true);
    CHECK(!fc_order_is_followed(domain));
    check_after(0, "");
    use("0 1");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_after(0, "1");
    end_domain();
    /* Alone nothing travels in forward. */
    make_domain(1, false);
    forward(true, "0 1");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    CHECK(!fc_order_is_followed(domain));
    end_domain();
}

/* ---- what is forgotten ---- */

static void test_written(void)
{
    make_domain(2, false);
    forward(true, "0 1");
    backward("1 0");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    use("0 1");
    fc_order_note_written(domain);
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    open(FC_PHASE_BACKWARD); /* leaves no order of forwards */
    CHECK_EQ(order_told(domain, false), 0);
    CHECK(fc_order_is_learnt(domain));
    check_after(1, "0");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    forward(true, "0 2");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_after(0, "2");
    end_domain();
}

static void test_failed(void)
{
    make_domain(2, false);
    forward(true, "0 1 2");
    backward("2 1 0");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    use("1");
    fc_domain_fail(domain);
    CHECK(!fc_order_is_followed(domain));
    open(FC_PHASE_FORWARD); /* none is left */
    CHECK_EQ(order_told(domain, false), 0);
    order_heard(domain, true, true);
    CHECK(!fc_order_is_followed(domain));
    use("0 1 2");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    open(FC_PHASE_BACKWARD); /* that of backwards is */
    check_after(2, "1 0");
    use("0 1");
    fc_domain_fail(domain);
    open(FC_PHASE_BACKWARD); /* and stays where one fails */
    check_after(2, "1 0");
    end_domain();
}

/* ---- sizes ---- */

static void test_sizes(void)
{
    const size_t bytes = fc_round_up(1, FC_PAGE);
    fc_order_walk walk;

    make_domain(2, false);
    CHECK_EQ(fc_unit_layout(unit_of(0))->full_bytes, bytes);
    CHECK(order_is_small(unit_of(0)) && !order_is_small(unit_of(LARGE)));
    CHECK(fc_order_may_take(unit_of(0)) && !fc_order_may_take(unit_of(LARGE)));
    forward(true, "0 1 3 2 4");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_after(0, "1 2 4");
    /* As many as the limit allows. */
    fc_batch_limit(domain, 2 * bytes);
    walk = fc_order_after(unit_of(0));
    CHECK(fc_order_next(&walk) == unit_of(1));
    fc_order_take(&walk, unit_of(1));
    CHECK(fc_order_next(&walk) == unit_of(2));
    fc_order_take(&walk, unit_of(2));
    CHECK(fc_order_next(&walk) == NULL);
    fc_batch_limit(domain, bytes);
    CHECK(fc_order_may_take(unit_of(0)));
    fc_batch_limit(domain, bytes - 1);
    check_after(0, "");
    CHECK(!fc_order_may_take(unit_of(0)));
    fc_batch_limit(domain, LIMIT);
    CHECK_EQ(fc_order_n_ahead(domain), 0);
    fc_order_set_ahead(unit_of(0), true);
    fc_order_set_ahead(unit_of(1), true);
    CHECK_EQ(fc_order_n_ahead(domain), 2);
    fc_order_set_ahead(unit_of(0), false);
    CHECK_EQ(fc_order_n_ahead(domain), 1);
    end_domain();
    make_domain(2, true); /* whose gathers may begin before their use */
    CHECK(fc_order_may_take(unit_of(0)) && fc_order_may_take(unit_of(LARGE)));
    end_domain();
}

/* The largest that is small: what all ranks have of it, and what they send. */
static void test_largest_small(void)
{
    for (int more = 0; more < 2; more++) {
        large_rows = FC_BATCH_UNIT_BYTES / sizeof(float) + (size_t)more;
        make_domain(2, false);
        CHECK_EQ(order_is_small(unit_of(LARGE)), more == 0);
        CHECK_EQ(2 * fc_unit_layout(unit_of(LARGE))->pack_bytes == FC_BATCH_UNIT_BYTES, more == 0);
        CHECK_EQ(fc_unit_layout(unit_of(LARGE))->full_bytes == FC_BATCH_UNIT_BYTES, more == 0);
        end_domain();
    }
    large_rows = 20000;
}

/* A phase of one unit is an order; no bytes at all are no limit. */
static void test_little(void)
{
    make_domain(2, false);
    forward(true, "0 1 2");
    forward(true, "1");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_after(1, "");
    check_after(0, "");
    fc_batch_limit(domain, 1);
    CHECK(order_told(domain, false) != 0);
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    open(FC_PHASE_BACKWARD);
    fc_domain_fail(domain); /* leaves no order of forwards */
    CHECK_EQ(order_told(domain, false), 0);
    CHECK(fc_order_is_learnt(domain));
    fc_batch_limit(domain, 0);
    CHECK(!fc_order_is_learnt(domain));
    end_domain();
}

/* Ranks that left a backward at its end know another order than those that ended it: nobody follows
 * one before all have made the next. */
static void test_other_backward(void)
{
    make_domain(2, false);
    forward(true, "0 1 2");
    backward("2 1 0");
    for (int n = 0; n < 3; n++) {
        const bool is_alike = n != 1;

        open(FC_PHASE_FORWARD);
        CHECK(order_told(domain, true) != 0);
        order_heard(domain, true, is_alike);
        order_heard(domain, true, !is_alike); /* the first gather decides */
        CHECK(fc_order_is_followed(domain));
        use("0 1 2");
        CHECK_EQ(fc_domain_close(domain), FC_OK);
        open(FC_PHASE_BACKWARD);
        CHECK_EQ(fc_order_is_followed(domain), is_alike);
        check_after(2, is_alike ? "1 0" : "");
        use("2 1 0");
        CHECK_EQ(fc_domain_close(domain), FC_OK);
    }
    end_domain();
}

/* What is behind an order's end is of an older one, in the same memory. */
static void test_shorter(void)
{
    make_domain(2, false);
    forward(true, "0 1 4 2");
    forward(true, "0 1");
    forward(true, "0 1");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_after(0, "1");
    use("4"); /* which is not in it, and leaves the place */
    check_after(0, "1");
    use("0 1");
    check_after(1, "");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    end_domain();
    make_domain(2, false);
    forward(true, "0 1 2 0 1 2"); /* as many as its memory has room for */
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_after(4, "");
    use("4");
    check_after(2, "0 1 2");
    use("0 1 2 0 1");
    check_after(2, "");
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    end_domain();
}

/* ---- who may begin ---- */

static fc_unsharding unshardings[N_UNITS];

static void make_unshardings(void)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        unshardings[u] = (fc_unsharding){.domain = domain, .state = FC_UNIT_SHARDED};
        unit_of(u)->unsharding = &unshardings[u];
    }
}

static void check_next_large(const fc_unsharding *expected)
{
    CHECK(fc_order_next_large(domain) == expected);
}

/* The next one that is too large to come along, and away. */
static void test_next_large(void)
{
    make_domain(2, true);
    make_unshardings();
    forward(true, "0 1 3 4");
    backward("4 3 1 0");
    open(FC_PHASE_FORWARD);
    check_next_large(NULL); /* it is not followed yet */
    order_heard(domain, true, true);
    check_next_large(&unshardings[LARGE]);
    unshardings[LARGE].state = FC_UNIT_UNSHARDED;
    check_next_large(NULL);
    unshardings[LARGE].state = FC_UNIT_SHARDED;
    use("0");
    check_next_large(&unshardings[LARGE]);
    use("3");
    check_next_large(NULL);
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    open(FC_PHASE_BACKWARD);
    use("4");
    check_next_large(&unshardings[LARGE]);
    fc_batch_limit(domain, 0);
    check_next_large(NULL);
    fc_batch_limit(domain, 1); /* all are too large */
    check_next_large(&unshardings[LARGE]);
    use("3");
    check_next_large(&unshardings[1]);
    fc_domain_fail(domain);
    end_domain();
    make_domain(2, true);
    make_unshardings();
    forward(true, "0 1 3");
    forward(true, "0 1");
    forward(true, "0 1");
    open(FC_PHASE_FORWARD);
    order_heard(domain, true, true);
    check_next_large(NULL); /* of an older order */
    CHECK_EQ(fc_domain_close(domain), FC_OK);
    end_domain();
}

/* What came ahead is counted until it is used or dropped, whatever becomes of the phase. */
static void test_ahead(void)
{
    make_domain(2, false);
    forward(true, "0 1 2");
    fc_order_set_ahead(unit_of(1), true);
    open(FC_PHASE_FORWARD);
    CHECK_EQ(fc_order_n_ahead(domain), 1);
    use("0");
    fc_domain_fail(domain);
    CHECK_EQ(fc_order_n_ahead(domain), 1);
    fc_order_set_ahead(unit_of(1), false);
    end_domain();
}

int main(void)
{
    test_shorter();
    test_other_backward();
    test_next_large();
    test_ahead();
    test_largest_small();
    test_little();
    test_forward();
    test_both();
    test_empty();
    test_many();
    test_no_memory();
    test_told();
    test_written();
    test_failed();
    test_sizes();
    return check_result();
}
