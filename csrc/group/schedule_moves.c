/* The pieces that a unit's kernels move: shards to packs, packs to parameters, gradients to parts
 * and parts to gradients. */
#include "group/schedule_private.h"

#include "base/alloc.h"

typedef struct piece_list {
    fc_piece *pieces; /* owned */
    size_t n;
} piece_list;

static size_t row_bytes(const fc_param *p, fc_dtype dtype)
{
    return p->inner * fc_dtype_bytes(dtype);
}

/* The chunk of a rank as it travels: [outer, rows, inner], contiguous. */
static fc_piece chunk_piece(const fc_param *p, size_t rows, fc_dtype to, fc_dtype from)
{
    size_t run = rows * p->inner;

    return (fc_piece){.n_runs = p->outer,
                      .run_numel = run,
                      .to_step = run,
                      .from_step = run,
                      .to = to,
                      .from = from};
}

static void add_piece(piece_list *list, fc_piece piece)
{
    if (piece.n_runs > 0 && piece.run_numel > 0) {
        list->pieces[list->n++] = piece;
    }
}

/* Shards of the original type into the own pack. */
static void list_pack(const fc_layout *l, piece_list *list)
{
    size_t i;

    for (i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];
        fc_piece piece = chunk_piece(p, p->own_rows, p->compute, p->orig);

        piece.from_base = i;
        piece.to_at = p->pack_at;
        add_piece(list, piece);
    }
}

/* All packs into the unsharded buffer, whose offsets are those of `home`. */
static void list_unpack(const fc_layout *l, const fc_layout *home, piece_list *list)
{
    size_t i;
    int r;

    for (i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];

        for (r = 0; r < l->n_ranks; r++) {
            size_t rows = fc_layout_rows(p, r, l->n_ranks);
            fc_piece piece = chunk_piece(p, rows, p->compute, p->compute);

            piece.to_at =
                home->params[i].full_at + (size_t)r * p->chunk_rows * row_bytes(p, p->compute);
            piece.to_step = p->rows * p->inner;
            piece.from_at = (size_t)r * l->pack_bytes + p->pack_at;
            add_piece(list, piece);
        }
    }
}

/* This rank's part of the unsharded buffer, into a pack of a smaller group. */
static void list_slice(const fc_layout *l, const fc_layout *home, piece_list *list)
{
    size_t i;

    for (i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];
        fc_piece piece = chunk_piece(p, p->own_rows, p->compute, p->compute);

        piece.to_at = p->pack_at;
        piece.from_at =
            home->params[i].full_at + (size_t)l->rank * p->chunk_rows * row_bytes(p, p->compute);
        piece.from_step = p->rows * p->inner;
        add_piece(list, piece);
    }
}

/* Full gradients into the parts of all ranks. */
static void list_stage(const fc_layout *l, piece_list *list)
{
    size_t i;
    int r;

    for (i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];

        for (r = 0; r < l->n_ranks && p->has_grad && p->trainable; r++) {
            size_t rows = fc_layout_rows(p, r, l->n_ranks);
            fc_piece piece = chunk_piece(p, rows, p->reduce, p->compute);

            piece.to_at = (size_t)r * l->trainable_part_bytes + p->part_at;
            piece.from_base = i;
            piece.from_at = (size_t)r * p->chunk_rows * row_bytes(p, p->compute);
            piece.from_step = p->rows * p->inner;
            add_piece(list, piece);
        }
    }
}

/* This rank's part into its gradients. */
static void list_finish(const fc_layout *l, piece_list *list)
{
    size_t i;

    for (i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];
        fc_piece piece = chunk_piece(p, p->own_rows, p->grad, p->reduce);

        piece.to_at = p->grad_at;
        piece.from_at = p->part_at;
        if (p->has_grad && p->trainable) {
            add_piece(list, piece);
        }
    }
}

static fc_status make(fc_schedule_unit *unit, piece_list *list, fc_moves **out)
{
    fc_schedule *s = unit->schedule;
    fc_status st = s->ops->moves_create(s->options.device, list->pieces, list->n, out);

    list->n = 0;
    return st;
}

static fc_status make_all(fc_schedule_unit *unit, piece_list *list)
{
    const fc_layout *l = unit->options.layout;
    const fc_layout *post = unit->options.post_layout;

    list_pack(l, list);
    FC_TRY(make(unit, list, &unit->pack));
    list_unpack(l, l, list);
    FC_TRY(make(unit, list, &unit->unpack));
    list_stage(l, list);
    FC_TRY(make(unit, list, &unit->stage));
    list_finish(l, list);
    FC_TRY(make(unit, list, &unit->finish));
    add_piece(list, (fc_piece){.n_runs = 1,
                               .run_numel = unit->part_bytes / fc_dtype_bytes(unit->reduce),
                               .to = unit->reduce,
                               .from = unit->reduce});
    FC_TRY(make(unit, list, &unit->add));
    if (post != NULL) {
        list_slice(post, l, list);
        FC_TRY(make(unit, list, &unit->slice));
        list_unpack(post, l, list);
        FC_TRY(make(unit, list, &unit->post_unpack));
    }
    return FC_OK;
}

fc_status fc_schedule_moves_create(fc_schedule_unit *unit)
{
    const fc_layout *l = unit->options.layout;
    size_t most = l->n_params * (size_t)l->n_ranks + 1;
    piece_list list = {.pieces = fc_alloc(most, sizeof(fc_piece))};
    fc_status st;

    if (list.pieces == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit '%s': %zu pieces", unit->name, most);
    }
    st = make_all(unit, &list);
    fc_free(list.pieces);
    return st;
}

void fc_schedule_moves_destroy(fc_schedule_unit *unit)
{
    fc_moves *const all[] = {unit->pack,  unit->unpack, unit->slice, unit->post_unpack,
                             unit->stage, unit->finish, unit->add};
    fc_schedule *s = unit->schedule;
    size_t i;

    for (i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        s->ops->moves_destroy(s->options.device, all[i]);
    }
}
