/* What travels of packed sections, against a list of the bytes of the parameters present. */
#include "check.h"

#include "base/alloc.h"
#include "engine/layout.h"
#include "engine/present.h"

#define MAX_PARAMS 80
#define MAX_RANKS 4
#define ROUNDS 2000

static uint64_t state = 7;

static uint64_t draw(uint64_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % below;
}

static void draw_param(fc_param *p)
{
    static const fc_dtype types[] = {FC_F32, FC_BF16, FC_F64};

    memset(p, 0, sizeof(*p));
    p->outer = draw(4) == 0 ? 2 : 1;
    p->rows = draw(9);
    p->inner = 1 + draw(5);
    p->has_grad = draw(6) != 0;
    p->trainable = p->has_grad && draw(4) != 0;
    p->is_packed = true;
    p->orig = p->compute = p->grad = p->has_grad ? types[draw(3)] : FC_I64;
    p->reduce = p->has_grad ? types[draw(2)] : FC_I64;
}

/* A byte that says whose it is: of which rank's row, which parameter, and where in it. */
static char mark(size_t row, size_t param, size_t byte)
{
    return (char)(row * 101 + param * 37 + byte * 3 + 1);
}

static bool lies_in(const fc_param *p, const fc_section *section)
{
    return p->has_grad && p->part_at >= section->at && p->part_at < section->at + section->bytes;
}

static bool has(const uint64_t *mask, size_t i)
{
    return (mask[i / 64] >> (i % 64) & 1) != 0;
}

static size_t chunk_bytes(const fc_param *p)
{
    return p->chunk_numel * fc_dtype_bytes(p->reduce);
}

static void fill(const fc_layout *layout, const fc_section *section, char *rows, size_t n_rows)
{
    memset(rows, 0, n_rows * section->bytes);
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t i = 0; i < layout->n_params; i++) {
            const fc_param *p = &layout->params[i];

            for (size_t b = 0; lies_in(p, section) && b < chunk_bytes(p); b++) {
                rows[r * section->bytes + p->part_at - section->at + b] = mark(r, i, b);
            }
        }
    }
}

/* A row of parameters next to one another; its bytes. All of them where none is present. */
static size_t check_row(const fc_layout *layout, const fc_section *section, const uint64_t *mask,
                        const char *row, size_t r)
{
    size_t at = 0;

    for (size_t i = 0; i < layout->n_params; i++) {
        const fc_param *p = &layout->params[i];

        for (size_t b = 0; lies_in(p, section) && has(mask, i) && b < chunk_bytes(p); b++) {
            CHECK_EQ(row[at], mark(r, i, b));
            at++;
        }
    }
    return at;
}

static void check_section(const fc_layout *layout, const fc_section *section, const uint64_t *mask)
{
    const fc_present present = {.layout = layout, .mask = mask};
    const size_t n_rows = 1 + draw(MAX_RANKS);
    char *rows = fc_alloc(n_rows * section->bytes, 1);
    size_t bytes;

    fill(layout, section, rows, n_rows);
    bytes = present_pack(&present, section, rows, n_rows);
    CHECK(bytes > 0 && bytes <= section->bytes);
    for (size_t r = 0; r < n_rows; r++) {
        const size_t found = check_row(layout, section, mask, rows + r * bytes, r);

        CHECK(found == bytes || (found == 0 && bytes == section->bytes));
    }
    if (bytes < section->bytes) { /* what is behind the row was somebody else's */
        memset(rows + bytes, 0x55, n_rows * section->bytes - bytes);
    }
    present_unpack(&present, section, rows);
    for (size_t i = 0; i < layout->n_params; i++) {
        const fc_param *p = &layout->params[i];

        for (size_t b = 0; lies_in(p, section) && has(mask, i) && b < chunk_bytes(p); b++) {
            CHECK_EQ(rows[p->part_at - section->at + b], mark(0, i, b));
        }
    }
    fc_free(rows);
}

static void check_untouched(const fc_layout *layout, const fc_section *section)
{
    const fc_present present = {.layout = layout};
    char *rows = fc_alloc(2 * section->bytes, 1), *before = fc_alloc(2 * section->bytes, 1);

    fill(layout, section, rows, 2);
    memcpy(before, rows, 2 * section->bytes);
    CHECK_EQ(present_pack(&present, section, rows, 2), section->bytes);
    present_unpack(&present, section, rows);
    CHECK(memcmp(before, rows, 2 * section->bytes) == 0);
    fc_free(rows);
    fc_free(before);
}

static void test_random_layouts(void)
{
    fc_param params[MAX_PARAMS + 1]; /* one more than there are at most: nobody looks at it */
    fc_layout layout;

    draw_param(&params[MAX_PARAMS]);

    for (int round = 0; round < ROUNDS; round++) {
        const size_t n = 1 + draw(draw(10) == 0 ? MAX_PARAMS : 8);
        const int n_ranks = 1 + (int)draw(MAX_RANKS);
        const uint64_t density = draw(5); /* none to all */
        uint64_t mask[MAX_PARAMS / 64 + 1] = {0};

        for (size_t i = 0; i < n; i++) {
            draw_param(&params[i]);
            mask[i / 64] |= (uint64_t)(draw(4) < density) << (i % 64);
        }
        mask[n / 64] |= UINT64_C(1) << (n % 64);
        params[n].has_grad = true;
        CHECK_EQ(fc_layout_init(&layout, params, n, 0, n_ranks, false), FC_OK);
        for (size_t s = 0; s < layout.n_sections; s++) {
            check_section(&layout, &layout.sections[s], mask);
            check_untouched(&layout, &layout.sections[s]);
        }
        for (size_t s = 0; s < layout.n_frozen; s++) {
            check_section(&layout, &layout.frozen[s], mask);
        }
    }
}

int main(void)
{
    test_random_layouts();
    return check_result();
}
