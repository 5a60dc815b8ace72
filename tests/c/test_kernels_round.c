/* Casts to and from bf16 and fp16 in every kernel table against exact arithmetic. */
#include "check.h"
#include "kernel_values.h"

#include "kernels/kernels.h"

/* A short floating type: mantissa bits, exponent of the smallest denormal, largest finite value. */
typedef struct short_format {
    fc_dtype dtype;
    int mantissa_bits;
    int least_exponent;
    double largest;
} short_format;

static const short_format formats[] = {
    {FC_BF16, 7, -133, 0x1.fep127},
    {FC_F16, 10, -24, 65504},
};

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

int main(void)
{
    const fc_kern_table *const *tables;
    size_t n_tables = fc_kern_tables(&tables);

    for (size_t i = 0; i < n_tables; i++) {
        for (size_t f = 0; f < COUNT(formats); f++) {
            test_widening(tables[i], &formats[f]);
            test_halfway_cases(tables[i], &formats[f]);
            test_random_narrowing(tables[i], &formats[f]);
        }
    }
    return check_result();
}
