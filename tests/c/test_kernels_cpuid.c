/* Which tables are offered on CPUs that lack some of the instructions: the kernel lets CPUID trap,
 * and a handler answers in its place. */
#define _GNU_SOURCE /* REG_RIP */
#include "check.h"

#ifdef __x86_64__

#include "kernels/kern_tables.h"

#include <cpuid.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

#define ARCH_CPUID 0x1012 /* of arch_prctl: 0 lets CPUID trap */

/* What __builtin_cpu_supports has read, once, where it has read something. */
extern struct {
    unsigned vendor, type, subtype, features[1];
} __cpu_model;

enum {
    EAX,
    EBX,
    ECX,
    EDX,
    N_REGISTERS
};

enum {
    NEEDED_BY_AVX2 = 1,
    NEEDED_BY_AVX512 = 2,
    NEEDED_BY_BF16 = 4,
    NEEDED_BY_BOTH_512 = NEEDED_BY_AVX512 | NEEDED_BY_BF16,
    NEEDED_BY_ALL = NEEDED_BY_AVX2 | NEEDED_BY_BOTH_512
};

typedef struct cpu_feature {
    const char *name;
    unsigned leaf, subleaf, reg, bit;
    unsigned needed_by;
} cpu_feature;

static const cpu_feature features[] = {
    {"fma", 1, 0, ECX, 1u << 12, NEEDED_BY_AVX2},
    {"f16c", 1, 0, ECX, 1u << 29, NEEDED_BY_ALL},
    {"avx2", 7, 0, EBX, 1u << 5, NEEDED_BY_AVX2},
    {"avx512f", 7, 0, EBX, 1u << 16, NEEDED_BY_BOTH_512},
    {"avx512dq", 7, 0, EBX, 1u << 17, NEEDED_BY_BOTH_512},
    {"avx512bw", 7, 0, EBX, 1u << 30, NEEDED_BY_BOTH_512},
    {"avx512vl", 7, 0, EBX, 1u << 31, NEEDED_BY_BOTH_512},
    {"avx512_bf16", 7, 1, EAX, 1u << 5, NEEDED_BY_BF16},
};

#define BF16 (COUNT(features) - 1)

/* The CPU that the handler answers for: this one without `missing`, and with bfloat16 if that is
 * not missing; null while CPUID is asked as it is. */
static const cpu_feature *missing;

static bool trap_cpuid(bool is_trapped)
{
    return syscall(SYS_arch_prctl, ARCH_CPUID, is_trapped ? 0ul : 1ul) == 0;
}

static void put_bit(unsigned *regs, const unsigned *asked, const cpu_feature *f, bool is_set)
{
    const unsigned subleaf = f->leaf == 1 ? 0 : asked[1]; /* leaf 1 has no others */

    if (asked[0] == f->leaf && subleaf == f->subleaf) {
        regs[f->reg] = is_set ? regs[f->reg] | f->bit : regs[f->reg] & ~f->bit;
    }
}

static void answer(int signal_number, siginfo_t *info, void *context)
{
    greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)at[REG_RIP];
    const unsigned asked[] = {(unsigned)at[REG_RAX], (unsigned)at[REG_RCX]};
    unsigned regs[N_REGISTERS];

    (void)info;
    if (missing == NULL || code[0] != 0x0f || code[1] != 0xa2) { /* not CPUID */
        (void)signal(signal_number, SIG_DFL);
        return;
    }
    (void)trap_cpuid(false);
    __cpuid_count(asked[0], asked[1], regs[EAX], regs[EBX], regs[ECX], regs[EDX]);
    (void)trap_cpuid(true);
    put_bit(regs, asked, &features[BF16], true);
    put_bit(regs, asked, missing, false);
    at[REG_RAX] = regs[EAX];
    at[REG_RBX] = regs[EBX];
    at[REG_RCX] = regs[ECX];
    at[REG_RDX] = regs[EDX];
    at[REG_RIP] += 2;
}

/* The tables are looked at, not used. */
static void test_without(const cpu_feature *feature, bool has_avx2, bool has_avx512)
{
    bool avx2, avx512, bf16;

    missing = feature;
    memset(&__cpu_model, 0, sizeof(__cpu_model));
    CHECK_OR_EXIT(trap_cpuid(true));
    avx2 = fc_kern_table_avx2() != NULL;
    avx512 = fc_kern_table_avx512() != NULL;
    bf16 = fc_kern_table_avx512_bf16() != NULL;
    CHECK_OR_EXIT(trap_cpuid(false));
    missing = NULL;
    CHECK_MSG(avx2 == (has_avx2 && !(feature->needed_by & NEEDED_BY_AVX2)), "no %s: AVX2 %d",
              feature->name, avx2);
    CHECK_MSG(avx512 == (has_avx512 && !(feature->needed_by & NEEDED_BY_AVX512)),
              "no %s: AVX-512 %d", feature->name, avx512);
    CHECK_MSG(bf16 == (has_avx512 && !(feature->needed_by & NEEDED_BY_BF16)),
              "no %s: AVX-512 with bfloat16 %d", feature->name, bf16);
}

static const cpu_feature nothing = {.name = "nothing"};
static bool is_trapped_first;

/* Before tables are looked for. */
__attribute__((constructor(101))) static void begin(void)
{
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO};

    missing = &nothing;
    is_trapped_first = sigaction(SIGSEGV, &action, NULL) == 0 && trap_cpuid(true);
}

/* All that this CPU would have with bfloat16, in order. */
static void test_found(void)
{
    const fc_kern_table *const wanted[] = {fc_kern_table_ref(), fc_kern_table_avx2(),
                                           fc_kern_table_avx512(), fc_kern_table_avx512_bf16()};
    const fc_kern_table *const *tables;
    size_t n_tables = fc_kern_tables(&tables);
    size_t n = 0;

    for (size_t i = 0; i < COUNT(wanted); i++) {
        if (wanted[i] != NULL) {
            CHECK_OR_EXIT(n < n_tables);
            CHECK_STR(tables[n++]->name, wanted[i]->name);
        }
    }
    CHECK_EQ(n, n_tables);
    CHECK_STR(fc_kern()->name, tables[n - 1]->name);
}

int main(void)
{
    bool has_avx2, has_avx512;

    if (!is_trapped_first) {
        CHECK_SKIP("CPUID cannot trap here");
    }
    test_found();
    CHECK_OR_EXIT(trap_cpuid(false));
    has_avx2 = fc_kern_table_avx2() != NULL;
    has_avx512 = fc_kern_table_avx512() != NULL;
    test_without(&nothing, has_avx2, has_avx512);
    for (size_t i = 0; i < COUNT(features); i++) {
        test_without(&features[i], has_avx2, has_avx512);
    }
    return check_result();
}

#else

int main(void)
{
    CHECK_SKIP("no x86");
}

#endif
