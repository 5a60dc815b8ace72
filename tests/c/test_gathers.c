/* Which units are gathered straight into their parameters. */
#include "check.h"

#include "engine/gathers.h"

#define MUST(call) CHECK_EQ(call, FC_OK)
#define PARAMS 40

static fc_param params[PARAMS];
static fc_layout layout;

static fc_param matrix(size_t outer, size_t rows, size_t inner)
{
    return (fc_param){.outer = outer, .rows = rows, .inner = inner, .compute = FC_BF16};
}

static const char *why_staged(size_t n_params, int n_ranks, bool has_groups)
{
    const char *why;

    MUST(fc_layout_init(&layout, params, n_params, 0, n_ranks, false));
    why = fc_gathers_why_staged(&layout, has_groups);
    CHECK(why != NULL || fc_gathers_fit(&layout));
    return why;
}

static void fill(size_t rows)
{
    for (size_t i = 0; i < PARAMS; i++) {
        params[i] = matrix(1, rows, 4);
    }
}

/* Whatever stands behind the parameters is none. */
static void test_made(void)
{
    static const char made[] = "what it gathers is made for each gather";

    fill(8);
    for (size_t i = 0; i < 3; i++) {
        params[i].is_made = true;
        CHECK_STR(why_staged(3, 4, true), made);
        CHECK(!fc_gathers_fit(&layout));
        CHECK((i == 2) == (why_staged(2, 4, true) == NULL));
        params[i].is_made = false;
        params[i].n_inputs = 1;
        CHECK_STR(why_staged(3, 4, true), made);
        params[i].n_inputs = 0;
    }
    params[3].chunk_numel = 1;
    CHECK(why_staged(3, 4, true) == NULL);
}

static void test_uneven(void)
{
    static const char uneven[] = "a parameter is not sharded evenly on dim 0";

    for (size_t i = 0; i < 3; i++) {
        fill(8);
        params[i] = matrix(1, 7, 8);
        CHECK_STR(why_staged(3, 2, true), uneven);
        CHECK(!fc_gathers_fit(&layout));
    }
}

int main(void)
{
    test_made();
    test_uneven();
    fill(8);
    CHECK(why_staged(32, 4, true) == NULL);
    CHECK_STR(why_staged(33, 4, true), "it has many parameters");
    CHECK_STR(why_staged(3, 4, false), "a process group gathers one buffer at a time");
    CHECK_STR(why_staged(3, 3, true), "a parameter is not sharded evenly on dim 0");
    CHECK_STR(why_staged(3, 8, true), "a shard is no multiple of 16 bytes");
    params[1] = matrix(2, 8, 4);
    CHECK_STR(why_staged(3, 4, true), "a parameter is not sharded evenly on dim 0");
    fill(8);
    params[0] = matrix(1, 8, 1024);
    CHECK_STR(why_staged(8, 4, true), "its parameters differ much in size");
    CHECK(why_staged(4, 4, true) == NULL);
    params[1] = matrix(1, 0, 4); /* takes part in nothing */
    CHECK(why_staged(2, 4, true) == NULL);
    CHECK(why_staged(0, 4, true) == NULL);
    params[0] = params[1];
    CHECK(why_staged(2, 4, true) == NULL);
    /* One rank alone has its parameters in one piece, however they are sharded. */
    params[0] = matrix(3, 7, 1);
    CHECK(why_staged(PARAMS, 1, false) == NULL);
    return check_result();
}
