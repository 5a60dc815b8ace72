/* Copies, casts and sums of every kernel table against the plain reference, and it against numbers
 * by hand. */
#include "check.h"
#include "kernel_values.h"

#include "base/alloc.h"
#include "kernels/kernels.h"

#include <sys/mman.h>

#define MAX_SRCS 5
#define MAX_BYTES 8
#define GUARD_BYTES 64
#define GUARD_FILL 0xa5

static const double divisors[] = {1, 2, 3, 7};
/* Bytes between the last element and an unmapped page: an access beyond is a crash. */
static const size_t gaps[] = {0, 1, 6};

/* Random bit patterns, special values, and mostly ordinary numbers. */
static void fill_float(fc_dtype dtype, unsigned char *memory, size_t numel)
{
    fc_cast_fn narrow;
    const fc_kern_table *const *tables;

    (void)fc_kern_tables(&tables);
    narrow = tables[0]->cast[FC_F64][dtype];
    for (size_t i = 0; i < numel; i++) {
        uint64_t bits = random_bits();
        double value = bits % 16 == 0 ? specials[(bits >> 8) % COUNT(specials)] : ordinary();

        if (bits % 16 == 1) {
            bits = random_bits();
            memcpy(memory + i * fc_dtype_bytes(dtype), &bits, fc_dtype_bytes(dtype));
        } else {
            narrow(memory + i * fc_dtype_bytes(dtype), &value, 1);
        }
    }
}
/* ---- Tables against the reference ---- */

/* Memory that ends at an unmapped page. */
typedef struct guarded_room {
    unsigned char *end;
} guarded_room;

static size_t room_bytes(void)
{
    return fc_round_up(MAX_NUMEL * MAX_BYTES + 2 * GUARD_BYTES, FC_PAGE);
}

static guarded_room room_create(void)
{
    guarded_room room;
    unsigned char *start = mmap(NULL, room_bytes() + FC_PAGE, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK_OR_EXIT(start != MAP_FAILED);
    room.end = start + room_bytes();
    CHECK_OR_EXIT(mprotect(room.end, FC_PAGE, PROT_NONE) == 0);
    return room;
}

/* A copy of the content, `gap` bytes before the end; everything around it is guarded. */
static unsigned char *room_put(guarded_room room, const void *content, size_t bytes, size_t gap)
{
    unsigned char *place = room.end - gap - bytes;

    memset(place - GUARD_BYTES, GUARD_FILL, GUARD_BYTES + bytes + gap);
    memcpy(place, content, bytes);
    return place;
}

static bool room_is_intact(guarded_room room, const unsigned char *place, size_t bytes)
{
    bool is_intact = true;

    for (const unsigned char *p = place - GUARD_BYTES; p < place; p++) {
        is_intact = is_intact && *p == GUARD_FILL;
    }
    for (const unsigned char *p = place + bytes; p < room.end; p++) {
        is_intact = is_intact && *p == GUARD_FILL;
    }
    return is_intact;
}

static bool is_nan_at(fc_dtype dtype, const unsigned char *memory)
{
    uint16_t half;
    float single;
    double wide;

    switch (dtype) {
    case FC_F32:
        memcpy(&single, memory, sizeof(single));
        return isnan(single);
    case FC_F64:
        memcpy(&wide, memory, sizeof(wide));
        return isnan(wide);
    default:
        memcpy(&half, memory, sizeof(half));
        return (half & 0x7fff) > (dtype == FC_BF16 ? 0x7f80 : 0x7c00);
    }
}

/* The first element whose bits differ, or `numel`; two NaN are equal if `nan_alike`. */
static size_t first_difference(fc_dtype dtype, const unsigned char *a, const unsigned char *b,
                               size_t numel, bool nan_alike)
{
    size_t bytes = fc_dtype_bytes(dtype);

    for (size_t i = 0; i < numel; i++) {
        bool both_nan = nan_alike && fc_dtype_is_float(dtype) && is_nan_at(dtype, a + i * bytes) &&
                        is_nan_at(dtype, b + i * bytes);

        if (!both_nan && memcmp(a + i * bytes, b + i * bytes, bytes) != 0) {
            return i;
        }
    }
    return numel;
}

static guarded_room dst_room;
static guarded_room src_rooms[MAX_SRCS];
static unsigned char pool[MAX_SRCS][MAX_NUMEL * MAX_BYTES];
static unsigned char before[MAX_NUMEL * MAX_BYTES];
static unsigned char expected[MAX_NUMEL * MAX_BYTES];

typedef struct pair_case {
    fc_dtype from;
    fc_dtype to;
    size_t numel;
    size_t gap;
    size_t n_srcs;
    double divisor;
    bool accumulate;
} pair_case;

/* The destination of `c`, guarded, against what the reference made of the same. */
static void check_result_of(const pair_case *c, const char *name, const char *what,
                            const unsigned char *dst, bool nan_alike)
{
    size_t bytes = c->numel * fc_dtype_bytes(c->to);
    size_t at = memcmp(dst, expected, bytes) == 0
                    ? c->numel
                    : first_difference(c->to, dst, expected, c->numel, nan_alike);

    CHECK_MSG(at == c->numel && room_is_intact(dst_room, dst, bytes),
              "%s: %s %s to %s, numel %zu, gap %zu, n_srcs %zu, divisor %g, accumulate %d: "
              "element %zu differs, or memory around it (%zu)",
              name, what, fc_dtype_name(c->from), fc_dtype_name(c->to), c->numel, c->gap, c->n_srcs,
              c->divisor, (int)c->accumulate, at, c->numel);
}

/* At every gap. */
static void check_cast(fc_cast_fn ref, fc_cast_fn cast, const char *name, pair_case *c)
{
    size_t src_bytes = c->numel * fc_dtype_bytes(c->from);

    ref(expected, pool[0], c->numel);
    for (size_t g = 0; g < COUNT(gaps); g++) {
        unsigned char *src = room_put(src_rooms[0], pool[0], src_bytes, gaps[g]);
        unsigned char *dst;

        c->gap = gaps[g];
        dst = room_put(dst_room, before, c->numel * fc_dtype_bytes(c->to), c->gap);
        cast(dst, src, c->numel);
        check_result_of(c, name, "cast", dst, false);
    }
}

static void check_reduce(fc_reduce_fn ref, fc_reduce_fn reduce, const char *name, pair_case *c)
{
    size_t src_bytes = c->numel * fc_dtype_bytes(c->from);
    size_t dst_bytes = c->numel * fc_dtype_bytes(c->to);
    const void *srcs[MAX_SRCS];

    for (size_t s = 0; s < c->n_srcs; s++) {
        srcs[s] = pool[s];
    }
    memcpy(expected, before, dst_bytes);
    ref(expected, srcs, c->n_srcs, c->numel, c->divisor, c->accumulate);
    for (size_t g = 0; g < COUNT(gaps); g++) {
        unsigned char *dst;

        c->gap = gaps[g];
        for (size_t s = 0; s < c->n_srcs; s++) {
            srcs[s] = room_put(src_rooms[s], pool[s], src_bytes, (c->gap + s) % 8);
        }
        dst = room_put(dst_room, before, dst_bytes, c->gap);
        reduce(dst, srcs, c->n_srcs, c->numel, c->divisor, c->accumulate);
        check_result_of(c, name, "reduce", dst, true);
    }
}

/* All lengths, source counts and divisors, with and without accumulation. */
static void check_all_reduces(fc_reduce_fn ref, fc_reduce_fn reduce, const char *name, pair_case c)
{
    for (size_t i = 0; i < COUNT(numels) * MAX_SRCS * COUNT(divisors) * 2; i++) {
        size_t rest = i;

        c.numel = numels[rest % COUNT(numels)];
        rest /= COUNT(numels);
        c.n_srcs = 1 + rest % MAX_SRCS;
        rest /= MAX_SRCS;
        c.divisor = divisors[rest % COUNT(divisors)];
        c.accumulate = rest / COUNT(divisors) != 0;
        check_reduce(ref, reduce, name, &c);
    }
    /* Powers of two and others, some without a reciprocal that is a normal number. */
    c = (pair_case){c.from, c.to, 1000, 0, 2, 1, false};
    for (int exponent = -140; exponent <= 140; exponent += 10) {
        c.divisor = ldexp(1 + 0.5 * (exponent % 20 != 0), exponent);
        check_reduce(ref, reduce, name, &c);
    }
}

static void test_pair(const fc_kern_table *ref, const fc_kern_table *table, fc_dtype from,
                      fc_dtype to)
{
    pair_case c = {.from = from, .to = to};

    for (size_t s = 0; s < MAX_SRCS; s++) {
        fill_float(from, pool[s], MAX_NUMEL);
    }
    fill_float(to, before, MAX_NUMEL);
    for (size_t n = 0; n < COUNT(numels); n++) {
        c.numel = numels[n];
        check_cast(ref->cast[from][to], table->cast[from][to], table->name, &c);
    }
    check_all_reduces(ref->reduce[from][to], table->reduce[from][to], table->name, c);
}

static void fill_bytes(unsigned char *memory, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        memory[i] = (unsigned char)(random_bits() >> 20);
    }
}

static void test_integers(const fc_kern_table *ref, const fc_kern_table *table)
{
    for (size_t s = 0; s < MAX_SRCS; s++) {
        fill_bytes(pool[s], sizeof(pool[s]));
    }
    fill_bytes(before, sizeof(before));
    for (fc_dtype t = FC_U8; t <= FC_I64; t++) {
        CHECK(ref->reduce_int[t] != NULL && table->reduce_int[t] != NULL);
        check_all_reduces(ref->reduce_int[t], table->reduce_int[t], table->name,
                          (pair_case){.from = t, .to = t});
    }
}

static void test_copy(const fc_kern_table *table)
{
    fill_bytes(pool[0], sizeof(pool[0]));
    for (size_t n = 0; n < COUNT(numels); n++) {
        for (size_t g = 0; g < COUNT(gaps); g++) {
            unsigned char *src = room_put(src_rooms[0], pool[0], numels[n], gaps[g]);
            unsigned char *dst = room_put(dst_room, before, numels[n], gaps[COUNT(gaps) - 1 - g]);

            table->copy(dst, src, numels[n]);
            CHECK(memcmp(dst, pool[0], numels[n]) == 0);
            CHECK(room_is_intact(dst_room, dst, numels[n]));
            dst = room_put(dst_room, before, numels[n], gaps[COUNT(gaps) - 1 - g]);
            table->copy_away(dst, src, numels[n]);
            CHECK(memcmp(dst, pool[0], numels[n]) == 0);
            CHECK(room_is_intact(dst_room, dst, numels[n]));
        }
    }
    table->copy(NULL, NULL, 0);
}

/* ---- Sizes that are written past the cache ---- */

#define LARGE_BYTES (((size_t)16 << 20) + 4 * FC_PAGE)

static unsigned char *large_dst;
static unsigned char *large_expected;
static unsigned char *large_src;

/* Compares the destination, guards on both sides included. */
static void check_large(const char *name, const char *what, size_t start, size_t bytes)
{
    size_t end = start + bytes + GUARD_BYTES;
    size_t at = 0;

    if (memcmp(large_dst, large_expected, end) == 0) {
        return;
    }
    while (large_dst[at] == large_expected[at]) {
        at++;
    }
    CHECK_MSG(at == end, "%s: %s of %zu bytes at %zu: byte %zu differs", name, what, bytes, start,
              at);
}

/* Streaming begins at an aligned address, so starts differ; 1 can never be aligned for 4 bytes. */
static void test_large(const fc_kern_table *ref, const fc_kern_table *table)
{
    static const size_t starts[] = {0, 4, 1, 62};
    static const fc_dtype pairs[][2] = {
        {FC_F32, FC_BF16}, {FC_BF16, FC_F32}, {FC_F32, FC_F32}, {FC_F32, FC_F16}};

    for (size_t i = 0; i < COUNT(starts) * COUNT(pairs); i++) {
        size_t start = starts[i / COUNT(pairs)];
        fc_dtype from = pairs[i % COUNT(pairs)][0];
        fc_dtype to = pairs[i % COUNT(pairs)][1];
        size_t numel = ((size_t)10 << 20) / fc_dtype_bytes(from) + 77;
        size_t bytes;
        const void *srcs[2] = {large_src + start, large_src + 2 * start + 64};

        numel = fc_dtype_bytes(from) < fc_dtype_bytes(to) ? numel / 2 : numel;
        bytes = numel * fc_dtype_bytes(to);
        memset(large_dst, GUARD_FILL, LARGE_BYTES);
        memset(large_expected, GUARD_FILL, LARGE_BYTES);
        ref->cast[from][to](large_expected + start, srcs[0], numel);
        table->cast[from][to](large_dst + start, srcs[0], numel);
        check_large(table->name, "cast", start, bytes);
        ref->reduce[from][to](large_expected + start, srcs, 2, numel, 3, false);
        table->reduce[from][to](large_dst + start, srcs, 2, numel, 3, false);
        check_large(table->name, "reduce", start, bytes);
        memcpy(large_expected + start, large_src, bytes);
        table->copy(large_dst + start, large_src, bytes);
        check_large(table->name, "copy", start, bytes);
        memset(large_dst, GUARD_FILL, LARGE_BYTES);
        table->copy_away(large_dst + start, large_src, bytes);
        check_large(table->name, "copy_away", start, bytes);
    }
}

/* ---- What the reference must do, by hand ---- */

static void test_meaning(const fc_kern_table *table)
{
    const float big[] = {1e8f};
    const float one[] = {1};
    const float minus_big[] = {-1e8f};
    const float minus_zero[] = {-0.0f};
    const uint16_t bf16_one[] = {0x3f80};
    const uint16_t bf16_tiny[] = {0x3b80}; /* 2^-8: half of the last place of 1 */
    const uint8_t bytes[] = {200};
    float f32 = NAN;
    double f64 = NAN;
    uint16_t half = 0;
    uint8_t byte = 7;

    table->reduce[FC_F32][FC_F32](&f32, (const void *[]){big, one, minus_big}, 3, 1, 1, false);
    CHECK_MSG(f32 == 0, "%g: not added in order", (double)f32);
    table->reduce[FC_F32][FC_F32](&f32, (const void *[]){big, minus_big, one}, 3, 1, 1, false);
    CHECK_MSG(f32 == 1, "%g: not added in order", (double)f32);
    table->reduce[FC_F32][FC_F64](&f64, (const void *[]){big, one, minus_big}, 3, 1, 1, false);
    CHECK_MSG(f64 == 1, "%g: not added in double", f64);
    table->reduce[FC_F32][FC_F32](&f32, (const void *[]){minus_zero}, 1, 1, 2, false);
    CHECK(f32 == 0 && signbit(f32));
    f32 = 10;
    table->reduce[FC_F32][FC_F32](&f32, (const void *[]){one, one, one}, 3, 1, 2, true);
    CHECK_MSG(f32 == 11.5f, "%g: only the sum is divided", (double)f32);
    table->reduce[FC_BF16][FC_BF16](&half, (const void *[]){bf16_one, bf16_tiny, bf16_tiny}, 3, 1,
                                    1, false);
    CHECK_MSG(half == 0x3f81, "%#x: rounded more than once", (unsigned)half);
    table->reduce_int[FC_U8](&byte, (const void *[]){bytes, bytes}, 2, 1, 3, true);
    CHECK_EQ(byte, (7 + 200 + 200) % 256);
}

/* ---- Which tables there are ---- */

/* Whether the system says that all CPUs have what the space-separated names say. */
static bool cpu_has(const char *flags, const char *names)
{
    char name[32];
    int length;

    while (sscanf(names, " %29s%n", name + 1, &length) == 1) {
        name[0] = ' ';
        (void)strcat(name, " ");
        if (strstr(flags, name) == NULL) {
            return false;
        }
        names += length;
    }
    return true;
}

/* The line of /proc/cpuinfo, each flag between spaces; empty where CPUs are of another kind. */
static void read_flags(char *flags, int room)
{
    FILE *file = fopen("/proc/cpuinfo", "r");

    flags[0] = '\0';
    while (file != NULL && fgets(flags, room - 1, file) != NULL &&
           strncmp(flags, "flags", 5) != 0) {
        flags[0] = '\0';
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    (void)strcpy(flags + strcspn(flags, "\n"), " ");
}

static void test_which_tables(void)
{
    static const char *const wanted[][2] = {
        {"ref", ""},
        {"avx2", "avx2 fma f16c"},
        {"avx512", "avx512f avx512bw avx512vl avx512dq f16c"},
        {"avx512_bf16", "avx512f avx512bw avx512vl avx512dq f16c avx512_bf16"},
    };
    const fc_kern_table *const *tables;
    size_t n_tables = fc_kern_tables(&tables);
    char flags[8192];
    size_t n = 0;

    read_flags(flags, sizeof(flags));
    for (size_t i = 0; i < COUNT(wanted); i++) {
        if (cpu_has(flags, wanted[i][1])) {
            CHECK_OR_EXIT(n < n_tables);
            CHECK_STR(tables[n++]->name, wanted[i][0]);
        }
    }
    CHECK_EQ(n, n_tables);
}

static void test_lookup(void)
{
    const fc_kern_table *const *tables;
    size_t n_tables = fc_kern_tables(&tables);
    unsigned char from[33];
    unsigned char to[33];

    CHECK_OR_EXIT(n_tables >= 1);
    CHECK_STR(tables[0]->name, "ref");
    CHECK(fc_kern() == tables[n_tables - 1]);
    for (size_t i = 0; i < n_tables; i++) {
        CHECK(fc_kern_use(tables[i]->name) && fc_kern() == tables[i]);
        for (fc_dtype t = FC_F32; t < FC_DTYPE_COUNT; t++) {
            size_t bytes = 32 / fc_dtype_bytes(t) * fc_dtype_bytes(t);

            fill_bytes(from, sizeof(from));
            memcpy(to, before, sizeof(to));
            fc_kern_cast(t, t)(to, from, bytes / fc_dtype_bytes(t));
            CHECK(memcmp(to, from, bytes) == 0 && to[32] == before[32]);
        }
        CHECK(fc_kern_cast(FC_F32, FC_BF16) == tables[i]->cast[FC_F32][FC_BF16]);
        CHECK(fc_kern_reduce(FC_F16, FC_F64) == tables[i]->reduce[FC_F16][FC_F64]);
        CHECK(fc_kern_reduce(FC_I32, FC_I32) == tables[i]->reduce_int[FC_I32]);
    }
    CHECK(fc_kern_cast(FC_F32, FC_I32) == NULL && fc_kern_cast(FC_RAW4, FC_F32) == NULL);
    CHECK(fc_kern_cast(FC_I32, FC_RAW4) == NULL);
    CHECK(fc_kern_reduce(FC_I32, FC_I64) == NULL && fc_kern_reduce(FC_F32, FC_I32) == NULL);
    CHECK(fc_kern_reduce(FC_RAW4, FC_RAW4) == NULL);
    CHECK(!fc_kern_use("none") && fc_kern() == tables[n_tables - 1]);
}

/* Finite numbers whether read as F32, BF16 or F16: whole buffers are then compared as bytes. */
static void fill_finite(unsigned char *memory, size_t bytes)
{
    for (size_t at = 0; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
        uint64_t halves = random_bits() & 0xbfffbfffbfffbfffu;

        memcpy(memory + at, &halves, sizeof(halves));
    }
}

static void make_rooms(void)
{
    dst_room = room_create();
    for (size_t s = 0; s < MAX_SRCS; s++) {
        src_rooms[s] = room_create();
    }
    large_dst = fc_pages_alloc(FC_FOR_SLOTS, LARGE_BYTES);
    large_expected = fc_pages_alloc(FC_FOR_SLOTS, LARGE_BYTES);
    large_src = fc_pages_alloc(FC_FOR_SLOTS, LARGE_BYTES);
    CHECK_OR_EXIT(large_dst != NULL && large_expected != NULL && large_src != NULL);
    fill_finite(large_src, LARGE_BYTES);
}

/* What a table does by itself, then the same as the reference. */
static void test_table(const fc_kern_table *ref, const fc_kern_table *table)
{
    test_meaning(table);
    test_copy(table);
    if (table == ref) {
        return;
    }
    for (fc_dtype from = FC_F32; from < FC_FLOAT_COUNT; from++) {
        for (fc_dtype to = FC_F32; to < FC_FLOAT_COUNT; to++) {
            test_pair(ref, table, from, to);
        }
    }
    test_integers(ref, table);
    test_large(ref, table);
}

int main(void)
{
    const fc_kern_table *const *tables;
    size_t n_tables = fc_kern_tables(&tables);

    test_which_tables();
    test_lookup();
    make_rooms();
    for (size_t i = 0; i < n_tables; i++) {
        test_table(tables[0], tables[i]);
    }
    return check_result();
}
