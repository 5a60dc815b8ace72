/* Every kernel table against the plain reference, and the reference against exact arithmetic. */
#include "check.h"

#include "base/alloc.h"
#include "kernels/kernels.h"

#include <math.h>
#include <sys/mman.h>

#define MAX_NUMEL 4097
#define MAX_SRCS 5
#define MAX_BYTES 8
#define GUARD_BYTES 64
#define GUARD_FILL 0xa5

static const size_t numels[] = {0, 1, 7, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 4097};
static const double divisors[] = {1, 2, 3, 7};
/* Bytes between the last element and an unmapped page: an access beyond is a crash. */
static const size_t gaps[] = {0, 1, 6};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- Random numbers and values ---- */

static uint64_t random_bits(void)
{
    static uint64_t state = 0x9e3779b97f4a7c15u;

    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static const double specials[] = {
    0.0,
    -0.0,
    INFINITY,
    -INFINITY,
    NAN,
    -NAN,
    0x1p-149,
    -0x1p-149,
    0x1.8p-127,
    0x1p-126,
    0x1p-133,
    0x1p-24,
    -0x1p-24,
    0x1.8p-24,
    0x1p-25,
    0x1.000002p-25,
    0x1p-14,
    0x1.ffcp-15,
    65504,
    65519.996,
    65520,
    -65536,
    0x1.fffffep127,
    0x1.fep127,
    0x1.fefffep127,
    0x1.01p0,
    0x1.03p0,
    0x1.010002p0,
    0x1.002p0,
    0x1.006p0,
    0x1p-1074,
    0x1.fffffffffffffp1023,
    -0x1p128,
    1.0,
    -1.0,
};

/* A value that rounds: exponents close together, all mantissa bits in use. */
static double ordinary(void)
{
    return ldexp((double)(int64_t)random_bits(), -63 + (int)(random_bits() % 4));
}

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

/* ---- Exact arithmetic ---- */

/* A short floating type: mantissa bits, exponent of the smallest denormal, largest finite value. */
typedef struct short_format {
    fc_dtype dtype;
    int mantissa_bits;
    int least_exponent;
    double largest;
} short_format;

static const short_format bf16 = {FC_BF16, 7, -133, 0x1.fep127};
static const short_format f16 = {FC_F16, 10, -24, 65504};

static double decode(const short_format *format, uint16_t half)
{
    int mantissa = half & ((1 << format->mantissa_bits) - 1);
    int exponent = (half & 0x7fff) >> format->mantissa_bits;
    int special = 0x7fff >> format->mantissa_bits;
    double size;

    if (exponent == special) {
        size = mantissa == 0 ? INFINITY : NAN;
    } else if (exponent == 0) {
        size = ldexp(mantissa, format->least_exponent);
    } else {
        size =
            ldexp(mantissa + (1 << format->mantissa_bits), format->least_exponent + exponent - 1);
    }
    return half & 0x8000 ? -size : size;
}

/* `value` rounded to nearest even in the format: scaled so that its last place is 1. */
static double round_to(const short_format *format, double value)
{
    double size = fabs(value);
    int place = format->least_exponent;
    double rounded;

    if (size == 0 || isinf(size)) {
        return value;
    }
    if (ilogb(size) - format->mantissa_bits > place) {
        place = ilogb(size) - format->mantissa_bits;
    }
    rounded = ldexp(nearbyint(ldexp(size, -place)), place);
    return copysign(rounded > format->largest ? INFINITY : rounded, value);
}

/* `half` is what a kernel made of `value`. */
static void check_rounded(const char *table, const short_format *format, double value,
                          uint16_t half)
{
    double got = decode(format, half);

    if (isnan(value)) {
        int is_quiet = (half >> (format->mantissa_bits - 1)) & 1;

        CHECK_MSG(isnan(got) && is_quiet, "%s: NaN became %#x", table, (unsigned)half);
    } else {
        double expected = round_to(format, value);

        CHECK_MSG(got == expected && !signbit(got) == !signbit(expected),
                  "%s: %a became %s %a (%#x), expected %a", table, value,
                  fc_dtype_name(format->dtype), got, (unsigned)half, expected);
    }
}

static void check_narrow_f32(const fc_kern_table *table, const short_format *format,
                             const float *values, size_t numel)
{
    uint16_t halves[512];

    table->cast[FC_F32][format->dtype](halves, values, numel);
    for (size_t i = 0; i < numel; i++) {
        check_rounded(table->name, format, (double)values[i], halves[i]);
    }
}

static void check_narrow_f64(const fc_kern_table *table, const short_format *format,
                             const double *values, size_t numel)
{
    uint16_t halves[512];

    table->cast[FC_F64][format->dtype](halves, values, numel);
    for (size_t i = 0; i < numel; i++) {
        check_rounded(table->name, format, values[i], halves[i]);
    }
}

/* Around each short value and each halfway point above it, in F32 and far closer in F64. */
static void test_halfway_cases(const fc_kern_table *table, const short_format *format)
{
    static const double nudges[] = {0, 0x1p-23, -0x1p-23, 0x1p-50, -0x1p-50};
    float floats[2 * COUNT(nudges)];
    double doubles[2 * COUNT(nudges)];

    for (uint32_t half = 0; half < 0x10000; half++) {
        double here = decode(format, (uint16_t)half);
        double next = decode(format, (uint16_t)(half + 1));
        double middle = isfinite(next) && isfinite(here) ? here / 2 + next / 2 : here * 0x1.01p0;

        for (size_t k = 0; k < COUNT(nudges); k++) {
            doubles[2 * k] = here + here * nudges[k];
            doubles[2 * k + 1] = middle + middle * nudges[k];
            floats[2 * k] = (float)doubles[2 * k];
            floats[2 * k + 1] = (float)doubles[2 * k + 1];
        }
        check_narrow_f32(table, format, floats, COUNT(floats));
        check_narrow_f64(table, format, doubles, COUNT(doubles));
    }
}

static void test_random_narrowing(const fc_kern_table *table, const short_format *format)
{
    float floats[512];
    double doubles[512];

    for (int round = 0; round < 300; round++) {
        for (size_t i = 0; i < 512; i++) {
            uint32_t bits = (uint32_t)random_bits();

            memcpy(&floats[i], &bits, sizeof(bits));
            doubles[i] = (double)floats[i] * (1 + ordinary() * 0x1p-20);
        }
        check_narrow_f32(table, format, floats, 512);
        check_narrow_f64(table, format, doubles, 512);
    }
    for (size_t i = 0; i < COUNT(specials); i++) {
        floats[i] = (float)specials[i];
    }
    check_narrow_f32(table, format, floats, COUNT(specials));
    check_narrow_f64(table, format, specials, COUNT(specials));
}

/* All 2^16 values: exact, and NaN keeps sign and payload. */
static void test_widening(const fc_kern_table *table, const short_format *format)
{
    static uint16_t halves[0x10000];
    static uint32_t bits[0x10000];
    int shift = 23 - format->mantissa_bits;

    for (uint32_t i = 0; i < 0x10000; i++) {
        halves[i] = (uint16_t)i;
    }
    table->cast[format->dtype][FC_F32](bits, halves, 0x10000);
    for (uint32_t i = 0; i < 0x10000; i++) {
        double expected = decode(format, (uint16_t)i);
        float got;

        memcpy(&got, &bits[i], sizeof(got));
        if (isnan(expected)) {
            uint32_t mantissa = (1u << format->mantissa_bits) - 1;
            uint32_t quiet = format->dtype == FC_F16 ? 0x00400000 : 0; /* BF16 is only shifted */
            uint32_t nan = 0x7f800000 | (i & 0x8000) << 16 | (i & mantissa) << shift | quiet;

            CHECK_MSG(bits[i] == nan, "%s: %#x became %#x", table->name, i, bits[i]);
        } else {
            CHECK_MSG((double)got == expected && !signbit(got) == !signbit(expected),
                      "%s: %#x became %a, expected %a", table->name, i, (double)got, expected);
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

/* ---- Optimizer arithmetic ---- */

enum {
    PARAM,
    GRAD,
    EXP_AVG,
    EXP_AVG_SQ,
    SQUARES,
    N_ARRAYS
};

typedef float optim_arrays[N_ARRAYS][MAX_NUMEL + 2];

static void fill_optim(optim_arrays arrays)
{
    for (size_t a = 0; a < N_ARRAYS; a++) {
        for (size_t i = 0; i < MAX_NUMEL + 2; i++) {
            arrays[a][i] = (float)ordinary();
            if (a >= EXP_AVG_SQ) {
                arrays[a][i] = fabsf(arrays[a][i]);
            }
        }
    }
}

/* Of all arrays, in different lengths, into places that are else unused. */
static void run_norms(const fc_kern_table *table, optim_arrays x, size_t numel)
{
    const float *xs[2 * N_ARRAYS];
    size_t lengths[2 * N_ARRAYS];
    float found[2 * N_ARRAYS];

    for (size_t i = 0; i < COUNT(xs); i++) {
        xs[i] = x[i % N_ARRAYS];
        lengths[i] = i % 3 == 2 ? numel / 2 : numel;
    }
    table->norms(found, xs, lengths, COUNT(xs));
    for (size_t i = 0; i < N_ARRAYS; i++) {
        x[i][MAX_NUMEL] = found[i];
        x[i][MAX_NUMEL + 1] = found[N_ARRAYS + i];
    }
}

static void run_optim(const fc_kern_table *table, const fc_adam *adam, optim_arrays x, size_t numel,
                      size_t n_tail)
{
    table->adam_moments(adam, x[PARAM], x[GRAD], x[EXP_AVG], x[EXP_AVG_SQ], x[SQUARES], numel);
    table->adam_update(adam, x[PARAM], x[EXP_AVG], x[SQUARES], numel);
    table->adam(adam, FC_ROOT_NEAREST, x[PARAM], x[GRAD], x[EXP_AVG], x[EXP_AVG_SQ], numel, n_tail);
    CHECK(table->roots(FC_ROOT_NEAREST, x[SQUARES], numel));
    for (int kind = 0; kind < 6; kind++) {
        const fc_sgd sgd = {kind % 2 == 0 ? 0.0f : 0.1f, 0.9f, 0.7f, -0.01f, kind < 2};

        table->sgd(&sgd, x[PARAM], x[GRAD], kind < 4 ? x[EXP_AVG] : NULL, numel);
    }
    table->multiply(x[GRAD], 0.3f, numel);
    run_norms(table, x, numel);
}

static void test_optim(const fc_kern_table *ref, const fc_kern_table *table)
{
    static optim_arrays start;
    static optim_arrays wanted;
    static optim_arrays found;
    fc_adam_options options = {0.01, 0.9, 0.999, 1e-8, 0.1, true};
    fc_adam adam;

    for (size_t n = 0; n < COUNT(numels); n++) {
        size_t numel = numels[n] < MAX_NUMEL ? numels[n] : MAX_NUMEL - 1;

        for (int round = 0; round < 4; round++) {
            options.is_decoupled = round % 2 == 0;
            options.beta1 = round < 2 ? 0.9 : 0.3; /* both forms of the interpolation */
            fc_adam_set(&adam, &options, 3);
            fill_optim(start);
            memcpy(wanted, start, sizeof(start));
            memcpy(found, start, sizeof(start));
            run_optim(ref, &adam, wanted, numel, numel < 5 ? numel : 5);
            run_optim(table, &adam, found, numel, numel < 5 ? numel : 5);
            CHECK_MSG(memcmp(wanted, found, sizeof(found)) == 0, "%s: %zu elements, round %d",
                      table->name, numel, round);
        }
    }
}

/* The two kernels of one step with `root` between them. */
static void run_in_two(const fc_kern_table *table, const fc_adam *adam, fc_root root,
                       optim_arrays x, size_t numel)
{
    table->adam_moments(adam, x[PARAM], x[GRAD], x[EXP_AVG], x[EXP_AVG_SQ], x[SQUARES], numel);
    CHECK(table->roots(root, x[SQUARES], numel));
    table->adam_update(adam, x[PARAM], x[EXP_AVG], x[SQUARES], numel);
}

static void test_adam_with(const fc_kern_table *table, fc_root root)
{
    static optim_arrays wanted;
    static optim_arrays found;
    const fc_adam_options options = {0.01, 0.9, 0.999, 1e-8, 0.1, true};
    fc_adam adam;

    fc_adam_set(&adam, &options, 3);
    for (size_t n = 0; n < COUNT(numels); n++) {
        size_t numel = numels[n] < MAX_NUMEL ? numels[n] : MAX_NUMEL - 1;

        fill_optim(wanted);
        memcpy(found, wanted, sizeof(found));
        run_in_two(table, &adam, root, wanted, numel);
        table->adam(&adam, root, found[PARAM], found[GRAD], found[EXP_AVG], found[EXP_AVG_SQ],
                    numel, 0);
        CHECK_MSG(memcmp(wanted, found, sizeof(*found) * SQUARES) == 0, "%s: root %d, %zu elements",
                  table->name, (int)root, numel);
    }
}

/* Numbers of every size: one by one as many at once, next to the nearest, and quarters alike. */
static void test_roots(const fc_kern_table *table, fc_root root)
{
    static float x[MAX_NUMEL];
    static float quarters[MAX_NUMEL];

    for (size_t i = 0; i < MAX_NUMEL; i++) {
        x[i] = ldexpf(1 + (float)(i % 4096) / 4096, (int)(i % 270) - 147);
        quarters[i] = x[i] >= 0x1p-120f ? x[i] / 4 : x[i];
    }
    CHECK(table->roots(root, quarters, MAX_NUMEL));
    for (size_t i = 0; i < MAX_NUMEL; i++) {
        float by_itself = x[i];
        float nearest = sqrtf(x[i]);

        CHECK(table->roots(root, &by_itself, 1));
        CHECK_MSG(by_itself == quarters[i] * (x[i] >= 0x1p-120f ? 2 : 1), "%s: %a", table->name,
                  (double)x[i]);
        CHECK_MSG(fabsf(by_itself - nearest) <= nearest * 0x1p-23f, "%s: %a", table->name,
                  (double)x[i]);
    }
}

static void test_unusual_roots(const fc_kern_table *table, fc_root root)
{
    float x[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -1.0f, -0x1p-140f, 4.0f};

    CHECK(table->roots(root, x, COUNT(x)));
    CHECK(x[0] == 0 && !signbit(x[0]) && x[1] == 0 && signbit(x[1]) && x[7] == 2);
    CHECK(isinf(x[2]) && isnan(x[3]) && isnan(x[4]) && isnan(x[5]) && isnan(x[6]));
}

static void test_every_root(const fc_kern_table *table)
{
    for (fc_root root = FC_ROOT_NEAREST; root < FC_ROOT_COUNT; root++) {
        if (table->roots(root, NULL, 0)) {
            test_roots(table, root);
            test_unusual_roots(table, root);
            test_adam_with(table, root);
        }
    }
}

/* One number after the other, as the formulas say. */
static void test_optim_meaning(const fc_kern_table *table)
{
    const fc_adam_options options = {0.5, 0.5, 0.75, 1.0, 0.25, true};
    fc_adam adam;
    float x[] = {8, 2, 4, 4, 0}; /* parameter, gradient, averages, squares */

    fc_adam_set(&adam, &options, 1);
    CHECK(adam.decay == 0.875f && adam.correction == 0.5f && adam.step_size == -1.0f);
    table->adam_moments(&adam, &x[PARAM], &x[GRAD], &x[EXP_AVG], &x[EXP_AVG_SQ], &x[SQUARES], 1);
    CHECK(x[EXP_AVG] == 3 && x[EXP_AVG_SQ] == 4 && x[SQUARES] == 4);
    x[SQUARES] = 2;
    table->adam_update(&adam, &x[PARAM], &x[EXP_AVG], &x[SQUARES], 1);
    CHECK_MSG(x[PARAM] == 7 - 3.0f / 5, "%g", (double)x[PARAM]);
    x[PARAM] = 8;
    x[EXP_AVG] = 4;
    table->adam(&adam, FC_ROOT_NEAREST, &x[PARAM], &x[GRAD], &x[EXP_AVG], &x[EXP_AVG_SQ], 1, 0);
    CHECK_MSG(x[PARAM] == 7 - 3.0f / 5, "%g", (double)x[PARAM]);
    x[PARAM] = 8;
    x[EXP_AVG] = 4;
    table->sgd(&(const fc_sgd){0.25f, 0.5f, 0.75f, -0.5f, false}, &x[PARAM], &x[GRAD], &x[EXP_AVG],
               1);
    CHECK_MSG(x[EXP_AVG] == 5 && x[PARAM] == 5.5f, "%g %g", (double)x[EXP_AVG], (double)x[PARAM]);
    table->sgd(&(const fc_sgd){0, 0.5f, 1, -0.5f, true}, &x[PARAM], &x[GRAD], &x[EXP_AVG], 1);
    CHECK_MSG(x[EXP_AVG] == 4.5f && x[PARAM] == 3.375f, "%g %g", (double)x[EXP_AVG],
              (double)x[PARAM]);
    table->norms(&x[0], (const float *[]){(const float[]){3, 4}, NULL}, (const size_t[]){2, 0}, 2);
    CHECK(x[0] == 5 && x[1] == 0);
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
    test_optim_meaning(table);
    test_every_root(table);
    test_widening(table, &bf16);
    test_widening(table, &f16);
    test_halfway_cases(table, &bf16);
    test_halfway_cases(table, &f16);
    test_random_narrowing(table, &bf16);
    test_random_narrowing(table, &f16);
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
    test_optim(ref, table);
}

int main(void)
{
    const fc_kern_table *const *tables;
    size_t n_tables = fc_kern_tables(&tables);

    test_lookup();
    make_rooms();
    for (size_t i = 0; i < n_tables; i++) {
        test_table(tables[0], tables[i]);
    }
    return check_result();
}
