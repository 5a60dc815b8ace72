/* Layouts against brute force over elements: chunks, offsets, order, fingerprints. */
#include "check.h"
#include "guarded.h"

#include "base/alloc.h"
#include "engine/layout.h"

#define MAX_PARAMS 80
#define ROUNDS 1500

static uint64_t state = 1;

static uint64_t draw(uint64_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % below;
}

static fc_dtype draw_float(void)
{
    static const fc_dtype types[] = {FC_F32, FC_F64, FC_BF16, FC_F16};

    return types[draw(4)];
}

static void draw_param(fc_param *p)
{
    memset(p, (int)draw(256), sizeof(*p)); /* whatever stands in the computed fields */
    p->outer = draw(3) == 0 ? 1 + draw(4) : 1;
    p->rows = draw(14);
    p->inner = draw(6) == 0 ? draw(2) : 1 + draw(20);
    p->has_grad = draw(5) != 0;
    p->trainable = p->has_grad && draw(4) != 0;
    p->is_counted = draw(2) == 0;
    p->is_packed = false;
    p->is_made = draw(5) == 0;
    p->n_inputs = 0;
    p->orig = p->has_grad ? draw_float() : (draw(2) == 0 ? FC_I64 : FC_U8);
    p->compute = p->has_grad && draw(2) == 0 ? draw_float() : p->orig;
    p->reduce = p->has_grad ? draw_float() : p->orig;
    p->grad = p->has_grad ? draw_float() : p->orig;
}

/* Who owns each row: rank after rank takes up to chunk_rows of those that are left. */
static void check_rows(const fc_param *p, int n_ranks)
{
    size_t taken = 0;

    for (int r = 0; r < n_ranks; r++) {
        size_t rows = 0;

        while (rows * (size_t)n_ranks < p->rows && taken < p->rows) {
            rows++;
            taken++;
        }
        CHECK_EQ(fc_layout_rows(p, r, n_ranks), rows);
        CHECK(rows <= p->chunk_rows);
        CHECK(rows == p->chunk_rows || taken == p->rows);
    }
    CHECK_EQ(taken, p->rows);
}

/* One buffer: pieces are aligned, do not overlap and end within it. */
typedef struct piece {
    size_t at, bytes;
} piece;

static void check_pieces(const piece *pieces, size_t n, size_t total)
{
    for (size_t i = 0; i < n; i++) {
        CHECK_EQ(pieces[i].at % FC_ALIGN, 0);
        CHECK(pieces[i].at + pieces[i].bytes <= total);
        for (size_t j = i + 1; j < n; j++) {
            CHECK(pieces[i].at + pieces[i].bytes <= pieces[j].at ||
                  pieces[j].at + pieces[j].bytes <= pieces[i].at);
        }
    }
}

static void check_buffers(const fc_layout *l)
{
    piece full[MAX_PARAMS], pack[MAX_PARAMS], part[MAX_PARAMS], grad[MAX_PARAMS];
    size_t n = 0, trainable_end = 0;

    for (size_t i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];
        size_t chunk = p->outer * p->chunk_rows * p->inner;

        /* A chunk of a rank ends where the next begins, also for the last rank with its padding. */
        full[i] = (piece){p->full_at, (size_t)l->n_ranks * chunk * fc_dtype_bytes(p->compute)};
        pack[i] = (piece){p->pack_at, chunk * fc_dtype_bytes(p->compute)};
        CHECK_EQ(p->chunk_numel, chunk);
        if (p->has_grad) {
            /* With the element that counts the ranks. */
            part[n] = (piece){p->part_at, (chunk + p->is_counted) * fc_dtype_bytes(p->reduce)};
            grad[n] = (piece){p->grad_at, chunk * fc_dtype_bytes(p->grad)};
            if (p->trainable) {
                CHECK(part[n].at + part[n].bytes <= l->trainable_part_bytes);
                trainable_end = part[n].at + part[n].bytes > trainable_end
                                    ? part[n].at + part[n].bytes
                                    : trainable_end;
            } else {
                CHECK(part[n].at >= l->trainable_part_bytes);
            }
            n++;
        }
    }
    check_pieces(full, l->n_params, l->full_bytes);
    check_pieces(pack, l->n_params, l->pack_bytes);
    check_pieces(part, n, l->part_bytes);
    check_pieces(grad, n, l->grad_bytes);
    CHECK_EQ(l->full_bytes % FC_PAGE, 0);
    CHECK(l->trainable_part_bytes >= trainable_end);
    CHECK(l->part_bytes >= l->trainable_part_bytes);
}

/* Trainable parameters of one type stand together, and nobody else among them. */
static void check_sections(const fc_layout *l)
{
    size_t end = 0;

    for (size_t k = 0; k < l->n_sections; k++) {
        const fc_section *c = &l->sections[k];

        CHECK_EQ(c->at, end);
        CHECK(c->bytes > 0 && c->bytes % fc_dtype_bytes(c->reduce) == 0);
        CHECK(k == 0 || l->sections[k - 1].reduce < c->reduce);
        end += c->bytes;
    }
    CHECK_EQ(end, l->trainable_part_bytes);
    for (size_t i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];

        for (size_t k = 0; k < l->n_sections && p->has_grad && p->chunk_numel > 0; k++) {
            const fc_section *c = &l->sections[k];
            bool is_in = p->part_at >= c->at && p->part_at < c->at + c->bytes;

            CHECK_EQ(is_in, p->trainable && p->reduce == c->reduce);
        }
    }
}

/* One kernel call over all trainable parameters needs equal types at equal element offsets. */
static void check_uniform(const fc_layout *l)
{
    const fc_param *first = NULL;
    bool is_uniform = true;

    for (size_t i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];

        if (!p->has_grad || !p->trainable) {
            continue;
        }
        first = first == NULL ? p : first;
        is_uniform = is_uniform && p->reduce == first->reduce && p->grad == first->grad;
    }
    CHECK_EQ(l->is_uniform, first != NULL && is_uniform);
    for (size_t i = 0; i < l->n_params && l->is_uniform; i++) {
        const fc_param *p = &l->params[i];

        if (p->has_grad && p->trainable) {
            CHECK_EQ(p->part_at / fc_dtype_bytes(p->reduce), p->grad_at / fc_dtype_bytes(p->grad));
        }
    }
}

static void test_random(void)
{
    static fc_param params[MAX_PARAMS];
    fc_param *room = guarded_create(sizeof(params));

    for (int round = 0; round < ROUNDS; round++) {
        size_t n = round % 50 == 0 ? draw(MAX_PARAMS) : draw(9);
        int n_ranks = 1 + (int)draw(round % 3 == 0 ? 17 : 5);
        bool may_alias = draw(2) == 0;
        bool is_plain = draw(3) == 0;
        uint64_t print = 0;
        fc_param *copy = room + MAX_PARAMS - n; /* up to where no more can be read */

        for (size_t i = 0; i < n; i++) {
            draw_param(&params[i]);
            if (is_plain && params[i].has_grad) {
                params[i].reduce = FC_BF16;
                params[i].grad = FC_F32;
            }
        }
        for (int rank = 0; rank < n_ranks; rank++) {
            fc_layout l;

            memcpy(copy, params, n * sizeof(*params));
            CHECK_EQ(fc_layout_count(copy, n), n);
            CHECK_EQ(fc_layout_init(&l, copy, n, rank, n_ranks, may_alias), FC_OK);
            CHECK(!fc_layout_is_packed(&l));
            CHECK_EQ(l.rank, rank);
            CHECK_EQ(l.n_ranks, n_ranks);
            CHECK_EQ(l.mask_words, n / 64 + (n % 64 != 0));
            CHECK(rank == 0 || l.fingerprint == print);
            print = l.fingerprint;
            for (size_t i = 0; i < n; i++) {
                check_rows(&copy[i], n_ranks);
                CHECK_EQ(copy[i].own_rows, fc_layout_rows(&copy[i], rank, n_ranks));
                CHECK_EQ(copy[i].is_aliased, may_alias && !copy[i].is_made && copy[i].outer == 1 &&
                                                 copy[i].orig == copy[i].compute);
            }
            check_buffers(&l);
            check_sections(&l);
            check_uniform(&l);
        }
    }
    guarded_destroy(room, sizeof(params));
}

static uint64_t print_of(const fc_param *params, size_t n, int n_ranks, bool may_alias)
{
    fc_param copy[4];
    fc_layout l;

    memcpy(copy, params, n * sizeof(*params));
    CHECK_EQ(fc_layout_init(&l, copy, n, 0, n_ranks, may_alias), FC_OK);
    return l.fingerprint;
}

/* Ranks whose layouts differ in anything must notice. */
static void test_fingerprint(void)
{
    fc_param base[3], other[3];
    uint64_t prints[64];
    size_t n = 0;

    for (size_t i = 0; i < 3; i++) {
        base[i] = (fc_param){.outer = 1,
                             .rows = 4 + i,
                             .inner = 3,
                             .orig = FC_F32,
                             .compute = FC_F32,
                             .reduce = FC_F32,
                             .grad = FC_F32,
                             .has_grad = true,
                             .trainable = true};
    }
    prints[n++] = print_of(base, 3, 2, true);
    prints[n++] = print_of(base, 2, 2, true);
    prints[n++] = print_of(base, 0, 2, true);
    prints[n++] = print_of(base, 3, 2, false);
    for (size_t i = 0; i < 3; i++) {
        for (int change = 0; change < 14; change++) {
            memcpy(other, base, sizeof(base));
            other[i].outer += change == 0;
            other[i].rows += change == 1 ? 10 : 0;
            other[i].inner += change == 2;
            other[i].orig = change == 3 ? FC_BF16 : FC_F32;
            other[i].compute = change == 4 ? FC_BF16 : FC_F32;
            other[i].reduce = change == 5 ? FC_BF16 : FC_F32;
            other[i].grad = change == 6 ? FC_BF16 : FC_F32;
            other[i].has_grad = change != 7;
            other[i].trainable = change != 8;
            other[i].is_counted = change == 10;
            other[i].is_packed = change == 11;
            other[i].is_made = change == 12;
            other[i].is_complex = change == 13;
            if (change == 9) {
                fc_param swapped = other[i];

                other[i] = other[(i + 1) % 3];
                other[(i + 1) % 3] = swapped;
            }
            prints[n++] = print_of(other, 3, 2, true);
        }
    }
    CHECK_EQ(print_of(base, 3, 2, true), prints[0]);
    for (size_t i = 0; i < n; i++) {
        for (size_t j = i + 1; j < n; j++) {
            CHECK_MSG(prints[i] != prints[j], "layouts %zu and %zu", i, j);
        }
    }
}

/* Nothing lies between the chunks that travel, nor behind them. */
static void test_packed(void)
{
    fc_param params[3];
    fc_layout layout;
    size_t at = 0;

    for (size_t i = 0; i < 3; i++) {
        params[i] = (fc_param){.outer = 1,
                               .rows = 5 + i,
                               .inner = 3,
                               .orig = FC_F32,
                               .compute = FC_BF16,
                               .reduce = FC_F32,
                               .grad = FC_F32,
                               .has_grad = true,
                               .trainable = true,
                               .is_packed = true};
    }
    CHECK_EQ(fc_layout_init(&layout, params, 3, 1, 2, false), FC_OK);
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQ(params[i].pack_at, at * fc_dtype_bytes(FC_BF16));
        CHECK_EQ(params[i].part_at, at * fc_dtype_bytes(FC_F32));
        CHECK_EQ(params[i].grad_at, params[i].part_at);
        at += params[i].chunk_rows * 3;
    }
    CHECK_EQ(layout.pack_bytes, at * fc_dtype_bytes(FC_BF16));
    CHECK_EQ(layout.trainable_part_bytes, at * fc_dtype_bytes(FC_F32));
    CHECK_EQ(layout.n_sections, 1);
}

/* A unit without a parameter is not packed, and nothing travels of one without elements. */
static void test_packed_few(void)
{
    fc_param *param = guarded_create(sizeof(*param));
    fc_layout layout;

    *param = (fc_param){.outer = 1,
                        .rows = 0,
                        .inner = 3,
                        .orig = FC_F32,
                        .compute = FC_F32,
                        .reduce = FC_F32,
                        .grad = FC_F32,
                        .has_grad = true,
                        .trainable = true,
                        .is_packed = true};
    CHECK_EQ(fc_layout_init(&layout, param, 1, 0, 2, false), FC_OK);
    CHECK(fc_layout_is_packed(&layout));
    CHECK_EQ(layout.n_sections, 0);
    CHECK(fc_layout_section(&layout, param) == NULL);
    CHECK_EQ(fc_layout_init(&layout, param + 1, 0, 0, 2, false), FC_OK);
    CHECK(!fc_layout_is_packed(&layout));
    guarded_destroy(param, sizeof(*param));
}

/* What is added up or shown lies where its type can be read; what is gathered travels as bytes. */
static void test_packed_types(void)
{
    static const fc_dtype types[] = {FC_F32, FC_BF16, FC_F64, FC_F32};
    fc_param params[4];
    fc_layout layout;

    for (size_t i = 0; i < 4; i++) {
        params[i] = (fc_param){.outer = 1,
                               .rows = 3,
                               .inner = 3,
                               .orig = types[i],
                               .compute = types[i],
                               .reduce = types[i],
                               .grad = types[i],
                               .has_grad = true,
                               .trainable = i < 3,
                               .is_packed = true};
    }
    CHECK_EQ(fc_layout_init(&layout, params, 4, 0, 1, false), FC_OK);
    CHECK_EQ(layout.pack_bytes, 9 * (4 + 2 + 8 + 4));
    CHECK_EQ(layout.n_sections, 3);
    CHECK_EQ(layout.n_frozen, 1);
    for (size_t i = 0; i < 4; i++) {
        const fc_section *section = fc_layout_section(&layout, &params[i]);

        CHECK_EQ(section->at, params[i].part_at);
        CHECK_EQ(section->bytes, 9 * fc_dtype_bytes(types[i]));
        CHECK_EQ(section->at % fc_dtype_bytes(types[i]), 0);
        CHECK_EQ(fc_wire_at(&params[i], FC_WIRE_REDUCE), params[i].part_at);
        CHECK_EQ(params[i].grad_at % fc_dtype_bytes(types[i]), 0);
    }
    for (size_t i = 0; i < 4; i++) { /* and not where another one does */
        for (size_t k = 0; k < 4; k++) {
            const size_t bytes = 9 * fc_dtype_bytes(types[k]);

            CHECK(i == k || params[i].part_at < params[k].part_at ||
                  params[i].part_at >= params[k].part_at + bytes);
            CHECK(i == k || params[i].grad_at < params[k].grad_at ||
                  params[i].grad_at >= params[k].grad_at + bytes);
        }
    }
}

/* Inputs travel in their parameter's place, which keeps its place among the gradients. */
static void test_inputs(void)
{
    fc_param params[5];
    fc_layout layout;
    uint64_t print;

    for (size_t i = 0; i < 5; i++) {
        params[i] = (fc_param){.outer = 1,
                               .rows = i < 3 ? 5 : 2,
                               .inner = i < 3 ? 3 : 100 * i,
                               .orig = i < 3 ? FC_F32 : FC_RAW1,
                               .compute = i < 3 ? FC_F32 : FC_RAW1,
                               .reduce = FC_F32,
                               .grad = FC_F32,
                               .has_grad = i < 3,
                               .trainable = i < 3,
                               .is_made = i == 1 || i > 2,
                               .n_inputs = i == 1 ? 2 : 0};
    }
    CHECK_EQ(fc_layout_count(params, 3), 5);
    CHECK_EQ(fc_layout_init(&layout, params, 3, 1, 2, true), FC_OK);
    CHECK_EQ(layout.n_params, 3);
    CHECK_EQ(layout.n_entries, 5);
    CHECK(params[0].is_aliased && params[2].is_aliased);
    CHECK(!params[1].is_aliased && !params[3].is_aliased);
    CHECK_EQ(params[0].full_at, 0);
    CHECK_EQ(params[3].full_at, 128);
    CHECK_EQ(params[4].full_at, 128 + 640);
    CHECK_EQ(params[2].full_at, 128 + 640 + 832);
    CHECK_EQ(params[3].pack_at, 64);
    CHECK_EQ(params[4].pack_at, 64 + 320);
    CHECK_EQ(params[2].pack_at, 64 + 320 + 448);
    CHECK_EQ(layout.pack_bytes, 64 + 320 + 448 + 64);
    CHECK_EQ(params[2].part_at, 2 * params[1].part_at);
    CHECK_EQ(params[1].grad_at, params[1].part_at);
    CHECK_EQ(layout.trainable_part_bytes, 3 * params[1].part_at);
    print = layout.fingerprint;
    params[1].n_inputs = 1;
    CHECK_EQ(fc_layout_init(&layout, params, 3, 1, 2, true), FC_OK);
    CHECK(layout.fingerprint != print);
    params[0].n_inputs = 2; /* each parameter has its own */
    CHECK_EQ(fc_layout_init(&layout, params, 2, 1, 2, true), FC_OK);
    CHECK_EQ(params[2].pack_at, 0);
    CHECK_EQ(params[3].pack_at, 64);
    CHECK_EQ(params[4].pack_at, 64 + 320);
    params[0].n_inputs = 3;
    CHECK_EQ(fc_layout_count(params, 3), 3 + 3 + 1);
}

/* Gradients travel narrow where float32 adds them up, whatever those have that get none. */
static void test_narrow(void)
{
    fc_param params[2];
    fc_layout layout;

    for (size_t i = 0; i < 2; i++) {
        params[i] = (fc_param){.outer = 1,
                               .rows = 4,
                               .inner = 1,
                               .reduce = i == 0 ? FC_F32 : FC_BF16,
                               .has_grad = i == 0,
                               .trainable = true};
    }
    CHECK_EQ(fc_layout_init(&layout, params, 2, 0, 2, true), FC_OK);
    CHECK_EQ(fc_layout_wire(&layout, FC_BF16), FC_WIRE_BF16);
    CHECK_EQ(fc_layout_wire(&layout, FC_F64), FC_WIRE_REDUCE);
    params[1].has_grad = true;
    CHECK_EQ(fc_layout_init(&layout, params, 2, 0, 2, true), FC_OK);
    CHECK_EQ(fc_layout_wire(&layout, FC_BF16), FC_WIRE_REDUCE);
}

static void test_too_large(void)
{
    fc_param p = {.outer = 1,
                  .rows = (size_t)1 << 60,
                  .inner = 1,
                  .orig = FC_F64,
                  .compute = FC_F64,
                  .reduce = FC_F64,
                  .grad = FC_F64,
                  .has_grad = true,
                  .trainable = true};
    fc_layout l;

    CHECK_EQ(fc_layout_init(&l, &p, 1, 0, 3, true), FC_ERR_INVALID);
    CHECK_HAS(fc_last_message(), "parameter 0 is too large");
    p.rows = (size_t)1 << 63;
    CHECK_EQ(fc_layout_init(&l, &p, 1, 0, 3, true), FC_ERR_INVALID);
    p.rows = (size_t)1 << 40;
    CHECK_EQ(fc_layout_init(&l, &p, 1, 0, 3, true), FC_OK);
    p.rows = SIZE_MAX / 64;
    CHECK_EQ(fc_layout_init(&l, &p, 1, 0, 1, true), FC_OK);
    p.rows++;
    CHECK_EQ(fc_layout_init(&l, &p, 1, 0, 1, true), FC_ERR_INVALID);
    p.rows = 1;
    CHECK_EQ(fc_layout_init(&l, &p, 1, 1023, 1024, true), FC_OK);
    CHECK_EQ(p.own_rows, 0);
    CHECK_EQ(p.chunk_rows, 1);
}

/* About the root of it, where something is reduced in float16. */
static void test_pre_divisor(void)
{
    static const struct {
        double divisor, before;
    } expected[] = {{1, 1}, {2, 2}, {4, 2}, {8, 4}, {6, 4}, {64, 8}, {3, 2}, {2.5, 1}, {0.5, 1}};
    fc_param params[2] = {{.outer = 1, .rows = 4, .inner = 4, .has_grad = true, .trainable = true},
                          {.outer = 1, .rows = 4, .inner = 4, .has_grad = true, .trainable = true}};
    fc_layout layout;

    params[1].reduce = FC_BF16;
    CHECK_EQ(fc_layout_init(&layout, params, 2, 0, 2, false), FC_OK);
    CHECK_EQ(fc_layout_pre_divisor(&layout, 8), 1);
    params[1].reduce = FC_F16;
    CHECK_EQ(fc_layout_init(&layout, params, 2, 0, 2, false), FC_OK);
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        CHECK_EQ(fc_layout_pre_divisor(&layout, expected[i].divisor), expected[i].before);
    }
    params[0].reduce = FC_F16; /* alone */
    CHECK_EQ(fc_layout_init(&layout, params, 2, 0, 2, false), FC_OK);
    CHECK_EQ(layout.n_sections, 1);
    CHECK_EQ(fc_layout_pre_divisor(&layout, 8), 4);
}

/* Complex numbers, which are two elements, begin at an even one behind packed chunks of an odd
 * size; parts and gradients stay alike, since both are read in one go. */
static void test_packed_complex(void)
{
    static const size_t inner[] = {3, 2, 5, 4}, at[] = {0, 10, 16, 32};
    fc_param params[4];
    fc_layout layout;

    for (size_t i = 0; i < 4; i++) {
        params[i] = (fc_param){.outer = 1,
                               .rows = 3,
                               .inner = inner[i],
                               .orig = FC_F32,
                               .compute = FC_F32,
                               .reduce = FC_F32,
                               .grad = FC_BF16,
                               .is_complex = i % 2 == 1,
                               .has_grad = true,
                               .trainable = true,
                               .is_packed = true};
    }
    CHECK_EQ(fc_layout_init(&layout, params, 4, 0, 1, false), FC_OK);
    CHECK(layout.is_uniform);
    for (size_t i = 0; i < 4; i++) {
        CHECK_EQ(params[i].part_at, at[i] * fc_dtype_bytes(FC_F32));
        CHECK_EQ(params[i].grad_at, at[i] * fc_dtype_bytes(FC_BF16));
    }
    CHECK_EQ(layout.part_bytes, 44 * fc_dtype_bytes(FC_F32));
    params[0].grad =
        FC_BF16; /* of another type than the one behind it, which begins in its words */
    params[1].grad = FC_F32;
    CHECK_EQ(fc_layout_init(&layout, params, 2, 0, 1, false), FC_OK);
    CHECK_EQ(params[1].part_at, 10 * fc_dtype_bytes(FC_F32));
    CHECK_EQ(params[1].grad_at, 24);
    params[0].rows = 5;
    params[0].inner = 1; /* an even one of its section, which begins at an odd one */
    params[1].reduce = FC_F64;
    CHECK_EQ(fc_layout_init(&layout, params, 2, 0, 1, false), FC_OK);
    CHECK_EQ(layout.sections[1].at, 24);
    CHECK_EQ(params[1].part_at, 24);
}

int main(void)
{
    test_random();
    test_fingerprint();
    test_packed();
    test_packed_few();
    test_packed_types();
    test_packed_complex();
    test_inputs();
    test_narrow();
    test_too_large();
    test_pre_divisor();
    CHECK_EQ(fc_alloc_live(), 0);
    return check_result();
}
