/* The runs of a plan, one after the other, through the CPU's kernels. */
#include "device/host/moves.h"

#include "kernels/kernels.h"

#include <string.h>

/* Elements of zeros that stand for a source without memory; of 8 bytes at most, as all types of
 * plans. */
#define ZEROS 64

typedef struct sum {
    double divisor;
    bool accumulate;
} sum;

static fc_host_operand operand_of(const fc_runs *plan, const fc_batch *batch, const fc_run *run,
                                  int side, fc_dtype dtype, const uint64_t *addresses)
{
    uint64_t base = addresses[plan->bases[batch->first_base + run->base[side]]];
    size_t n_planes = run->n_lines / run->lines_per_plane;
    fc_host_operand o = {.line_stride = run->line_stride[side],
                         .plane_stride = run->plane_stride[side]};

    if (base != 0) {
        o.first = (char *)(uintptr_t)(base + run->at[side]);
        o.bytes = (n_planes - 1) * o.plane_stride + (run->lines_per_plane - 1) * o.line_stride +
                  run->line_numel * fc_dtype_bytes(dtype);
    }
    return o;
}

void fc_host_visit(const fc_runs *plan, const uint64_t *addresses, fc_host_visitor visit,
                   const void *arg)
{
    size_t b, i;

    for (b = 0; b < plan->n_batches; b++) {
        const fc_batch *batch = &plan->batches[b];

        for (i = 0; i < batch->n_runs; i++) {
            const fc_run *run = &plan->runs[batch->first_run + i];

            visit(arg, run, operand_of(plan, batch, run, 0, (fc_dtype)run->to, addresses),
                  operand_of(plan, batch, run, 1, (fc_dtype)run->from, addresses));
        }
    }
}

static void move_line(const sum *s, const fc_run *run, char *to, const char *from)
{
    static const double zeros[ZEROS] = {0};
    fc_dtype to_type = (fc_dtype)run->to, from_type = (fc_dtype)run->from;
    size_t numel = run->line_numel, done, part;

    for (done = 0; done < numel; done += part) {
        const void *source =
            from == NULL ? (const char *)zeros : from + done * fc_dtype_bytes(from_type);
        char *target = to + done * fc_dtype_bytes(to_type);

        part = from == NULL && numel - done > ZEROS ? ZEROS : numel - done;
        if (!fc_dtype_is_float(to_type)) {
            memcpy(target, source, part * fc_dtype_bytes(to_type));
        } else if (s->divisor == 1.0 && !s->accumulate) {
            fc_kern_cast(from_type, to_type)(target, source, part);
        } else {
            fc_kern_reduce(from_type, to_type)(target, &source, 1, part, s->divisor, s->accumulate);
        }
    }
}

static size_t line_at(const fc_host_operand *o, const fc_run *run, size_t line)
{
    return line / run->lines_per_plane * o->plane_stride +
           line % run->lines_per_plane * o->line_stride;
}

static void move_run(const void *arg, const fc_run *run, fc_host_operand to, fc_host_operand from)
{
    size_t line;

    for (line = 0; line < run->n_lines; line++) {
        move_line(arg, run, to.first + line_at(&to, run, line),
                  from.first == NULL ? NULL : from.first + line_at(&from, run, line));
    }
}

void fc_host_move(const fc_runs *plan, const uint64_t *addresses, double divisor, bool accumulate)
{
    fc_host_visit(plan, addresses, move_run, &(sum){divisor, accumulate});
}
