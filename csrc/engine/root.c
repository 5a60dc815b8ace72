/* A root's forwards, what it does with failures, and what these share with backwards. */
#include "base/alloc.h"
#include "engine/exchange.h"
#include "engine/order.h"
#include "engine/root_private.h"

/* ---- life ---- */

void fc_root_unit_init(fc_root_unit *unit)
{
    *unit = (fc_root_unit){.training = FC_TRAINING_IDLE,
                           .reduce_grads = true,
                           .all_reduce_grads = true,
                           .reshard_after_backward = true,
                           .unshard_in_backward = true};
}

void fc_root_unit_fini(fc_root_unit *unit)
{
    fc_updates_clear(&unit->updates);
}

void fc_root_unit_bind(fc_root_unit *unit, fc_reduction *reduction, void *owner)
{
    if (unit->reduction != NULL) {
        fc_reduction_attach(unit->reduction, NULL);
        fc_traffic_add(&unit->past, fc_reduction_traffic(unit->reduction));
    }
    if (reduction != NULL) {
        fc_reduction_attach(reduction, owner);
        reduction->shard->is_finished = false;
    }
    unit->reduction = reduction;
    unit->owner = owner;
}

fc_reduce_options fc_root_unit_options(const fc_root_unit *unit, double factor)
{
    const fc_reduction *r = unit->reduction;
    double divisor = factor;

    if (fc_domain_is_packed(r->shard->domain)) {
        divisor = 1;
    } else if (factor == 0) {
        divisor = fc_domain_n_ranks(r->shard->domain);
        divisor *= r->replicate != NULL ? fc_domain_n_ranks(r->replicate->domain) : 1;
    }
    return (fc_reduce_options){divisor, unit->all_reduce_grads, unit->defers_hooks,
                               unit->force_sum};
}

void fc_root_module_join(fc_root_module *module, fc_root_unit *unit, bool is_grouped)
{
    module->unit = unit;
    module->is_grouped = is_grouped;
    module->backward = 0;
    for (fc_root_unit *u = unit; u != NULL; u = u->next) {
        u->finished_in = 0;
        u->input_seen_in = u->input_seen_in == 0 ? 0 : UINT64_MAX; /* by none of this root */
    }
}

fc_training fc_root_module_training(const fc_root_module *module, const fc_root_course *root)
{
    const bool is_over = module->training == FC_TRAINING_PRE_BACKWARD && root != NULL &&
                         module->backward != root->backward;

    return is_over ? FC_TRAINING_IDLE : module->training;
}

void fc_root_note_use(fc_unit *unit)
{
    unit->domain->n_reused += unit->is_finished;
    unit->is_finished = false;
}

fc_status fc_root_init(fc_root_course *root, fc_domain *const *domains, size_t n_domains,
                       fc_root_module *const *modules, size_t n_modules)
{
    root->domains = fc_alloc(n_domains + 1, sizeof(fc_domain *));
    root->modules = fc_alloc(n_modules + 1, sizeof(fc_root_module *));
    if (root->domains == NULL || root->modules == NULL) {
        fc_root_fini(root);
        return fc_fail(FC_ERR_NOMEM, "no memory for a root of %zu modules", n_modules);
    }
    root->finds_sums = false;
    for (size_t i = 0; i < n_domains; i++) {
        root->domains[i] = domains[i];
        root->finds_sums = root->finds_sums || (domains[i]->is_mapped && domains[i]->n_ranks > 1);
    }
    for (size_t i = 0; i < n_modules; i++) {
        root->modules[i] = modules[i];
    }
    root->n_domains = n_domains;
    root->n_modules = n_modules;
    root->publishes = true; /* until a forward has looked */
    root->n_changes = UINT64_MAX;
    root->backward = 1;
    fc_domain_link(domains, n_domains);
    return FC_OK;
}

void fc_root_fini(fc_root_course *root)
{
    fc_free(root->domains);
    fc_free(root->modules);
    root->domains = NULL;
    root->modules = NULL;
    root->n_domains = root->n_modules = 0;
    root->opener = NULL;
    root->schedule = NULL;
    fc_updates_clear(&root->updates);
}

/* ---- all domains, all units ---- */

bool fc_root_is_open(const fc_root_course *root)
{
    return root->n_domains > 0 && fc_domain_is_open(root->domains[0]);
}

bool fc_root_in_backward(const fc_root_course *root)
{
    return root->n_domains > 0 && fc_domain_in_backward(root->domains[0]);
}

bool fc_root_is_visible(const fc_root_course *root)
{
    bool is_visible = false;

    for (size_t i = 0; i < root->n_domains; i++) {
        is_visible = is_visible || fc_domain_is_visible(root->domains[i]);
    }
    return is_visible;
}

bool fc_root_is_between_steps(const fc_root_course *root)
{
    bool is_free = root->opener == NULL && !fc_root_in_backward(root);

    for (size_t i = 0; is_free && i < root->n_modules; i++) {
        FOR_EACH_UNIT(unit, root->modules[i])
        {
            is_free = is_free && unit->n_entered == 0 && !root->ops->has_accumulated(unit->owner);
        }
    }
    return is_free;
}

uint64_t root_count_reused(const fc_root_course *root)
{
    uint64_t n = 0;

    for (size_t i = 0; i < root->n_domains; i++) {
        n += root->domains[i]->n_reused;
    }
    return n;
}

fc_status root_each_unit(const fc_root_course *root, fc_status (*operation)(void *unit))
{
    for (size_t i = 0; i < root->n_modules; i++) {
        FOR_EACH_UNIT(unit, root->modules[i])
        {
            FC_TRY(operation(unit->owner));
        }
    }
    return FC_OK;
}

fc_status root_drop_ahead(const fc_root_course *root, fc_domain *domain)
{
    fc_unsharding_drop_begun(domain);
    for (size_t i = 0; fc_order_n_ahead(domain) > 0 && i < domain->n_units; i++) {
        void *owner = domain->units[i].owner;

        if (owner != NULL) { /* else its module is gone */
            FC_TRY(root->ops->drop_ahead(owner));
        }
    }
    return FC_OK;
}

static fc_window_phase shown_phase(fc_phase phase)
{
    static const fc_window_phase shown[] = {
        [FC_PHASE_FORWARD] = FC_WINDOW_FORWARD,
        [FC_PHASE_FORWARD_NO_GRAD] = FC_WINDOW_FORWARD_NO_GRAD,
        [FC_PHASE_UNSHARD] = FC_WINDOW_UNSHARD,
        [FC_PHASE_BACKWARD] = FC_WINDOW_BACKWARD,
    };

    return shown[phase];
}

fc_status root_open(fc_root_course *root, fc_opening opening)
{
    for (size_t i = 0; i < root->n_domains; i++) {
        FC_TRY(root_drop_ahead(root, root->domains[i]));
        fc_domain_open(root->domains[i], opening);
    }
    root_show(root, shown_phase(opening.phase));
    return FC_OK;
}

static fc_status close_kind(fc_root_course *root, bool are_replicate)
{
    for (size_t i = 0; i < root->n_domains; i++) {
        if (fc_domain_is_replicate(root->domains[i]) == are_replicate) {
            fc_domain_mark_closed(root->domains[i]);
        }
    }
    for (size_t i = 0; i < root->n_domains; i++) {
        if (fc_domain_is_replicate(root->domains[i]) == are_replicate) {
            FC_TRY(fc_domain_close(root->domains[i]));
        }
    }
    return FC_OK;
}

/* A rank whose shard group has failed the phase leaves it by an exception between its replicas,
 * which would hear nothing of that if it had closed it there. */
fc_status root_close(fc_root_course *root)
{
    FC_TRY(close_kind(root, false));
    return close_kind(root, true);
}

/* ---- forward ---- */

bool fc_root_was_left(const fc_root_course *root, const fc_root_module *module)
{
    const bool is_root = module == root->modules[0];
    const bool began_it = root->opener == module && module->training == FC_TRAINING_FORWARD;

    return root->opener != NULL && !module->is_grouped && (is_root || began_it);
}

/* Of one unit; shards that are not in their place may have no memory, nor those after them. */
static fc_status take_shards(fc_root_course *root, const fc_root_unit *unit, bool *is_intact)
{
    root->n_units++;
    root->publishes = root->publishes || root->ops->publishes(unit->owner);
    if (*is_intact) {
        FC_TRY(root->ops->is_intact(unit->owner, is_intact));
    }
    return *is_intact ? root->ops->note_shards(unit->owner) : FC_OK;
}

fc_status fc_root_take_shards(fc_root_course *root, bool *is_intact_out)
{
    root->publishes = root->has_grouped = false;
    root->n_units = 0;
    *is_intact_out = true;
    for (size_t i = 0; i < root->n_modules; i++) {
        root->has_grouped = root->has_grouped || root->modules[i]->is_grouped;
        FOR_EACH_UNIT(unit, root->modules[i])
        {
            FC_TRY(take_shards(root, unit, is_intact_out));
        }
    }
    return FC_OK;
}

/* The root's place for the module, by which ranks compare who began a phase. */
static uint32_t place_of(const fc_root_course *root, const fc_root_module *module)
{
    uint32_t i = 0;

    while (i < root->n_modules && root->modules[i] != module) {
        i++;
    }
    return i;
}

/* Of all units, bound or not. */
static fc_status find_updates(fc_root_course *root, uint64_t n_changes)
{
    if (root->n_changes == n_changes) {
        return FC_OK;
    }
    fc_updates_clear(&root->updates);
    for (size_t i = 0; i < root->n_modules; i++) {
        for (const fc_root_unit *u = root->modules[i]->unit; u != NULL; u = u->next) {
            FC_TRY(fc_updates_add(&root->updates, &u->updates));
        }
    }
    root->n_changes = n_changes;
    return FC_OK;
}

fc_status fc_root_open_forward(fc_root_course *root, fc_root_module *module, bool keeps_graph,
                               uint64_t n_changes)
{
    const fc_phase phase = keeps_graph ? FC_PHASE_FORWARD : FC_PHASE_FORWARD_NO_GRAD;
    fc_opening opening = {phase, place_of(root, module), 0};

    FC_TRY(find_updates(root, n_changes));
    opening.updates = fc_updates_count(&root->updates);
    if (root->publishes) {
        FC_TRY(root_each_unit(root, root->ops->publish));
    }
    FC_TRY(root_open(root, opening));
    if (root->schedule != NULL) {
        FC_TRY(root_each_unit(root, root->ops->release_unused));
        FC_TRY(root->ops->begin(root->owner));
    }
    root->opener = module;
    root->has_raised = false;
    return FC_OK;
}

fc_status fc_root_leave_unit(fc_root_course *root, fc_root_unit *unit, bool recomputes, bool stays,
                             bool is_needed)
{
    const fc_root_ops *ops = root->ops;
    const bool in_forward = unit->training == FC_TRAINING_FORWARD;
    const bool is_kept = in_forward && (stays || ops->is_kept_after_forward(unit->owner));

    /* What is recomputed leaves the parameters to the backward that needs them. */
    if (!recomputes && !is_kept && !is_needed) {
        FC_TRY(ops->reshard_after_forward(unit->owner, in_forward));
    }
    if (in_forward && !recomputes) {
        FC_TRY(ops->end_forward(unit->owner));
    }
    (void)fc_training_move(&unit->training, FC_TRAINING_LEFT);
    root_mark(unit, FC_WINDOW_EVENT_LEFT);
    return FC_OK;
}

static fc_status close_forward(fc_root_course *root)
{
    for (size_t i = 0; i < root->n_modules; i++) {
        FOR_EACH_UNIT(unit, root->modules[i])
        {
            FC_TRY(root->ops->check_unwritten(unit->owner));
            if (root->ops->is_kept_after_forward(unit->owner)) {
                FC_TRY(root->ops->keep(unit->owner));
            }
        }
    }
    for (size_t i = 0; i < root->n_domains; i++) {
        FC_TRY(root_drop_ahead(root, root->domains[i]));
    }
    return root_close(root);
}

fc_status fc_root_end_forward(fc_root_course *root, bool keeps_graph)
{
    root->opener = NULL;
    if (fc_root_in_backward(root) || !fc_root_is_open(root)) {
        return FC_OK;
    }
    FC_TRY(or_fail(root, close_forward(root)));
    root_show(root, FC_WINDOW_BETWEEN);
    return root->schedule != NULL && !keeps_graph ? fc_schedule_end_forward(root->schedule) : FC_OK;
}

/* ---- failure ---- */

static void fail_phase(fc_root_course *root)
{
    for (size_t i = 0; i < root->n_domains; i++) {
        fc_domain_fail(root->domains[i]);
    }
    root_show(root, FC_WINDOW_FAILED);
}

void fc_root_note_raised(fc_root_course *root, const fc_root_module *module)
{
    if (root->opener == module && !fc_root_in_backward(root)) {
        root->has_raised = true;
        fail_phase(root);
    }
}

void fc_root_fail(fc_root_course *root)
{
    root->context->awaits_end = false;
    root->context->is_failed = true;
    fail_phase(root);
}

static fc_status reset_unit(const fc_root_ops *ops, fc_root_unit *unit, bool drops_gradients)
{
    (void)fc_training_move(&unit->training, FC_TRAINING_ENDED);
    unit->n_entered = unit->n_passed = 0;
    unit->defers_hooks = false;
    (void)ops->end_awaiting(unit->owner);
    if (drops_gradients || !ops->has_own_memory(unit->owner)) {
        FC_TRY(ops->reshard(unit->owner, false));
        FC_TRY(ops->drop_pending(unit->owner));
    }
    fc_reduction_forget(unit->reduction);
    if (drops_gradients) {
        FC_TRY(ops->drop_gradients(unit->owner));
        unit->is_pending = false;
    }
    return FC_OK;
}

fc_status fc_root_reset(fc_root_course *root, bool drops_gradients)
{
    fc_root_context *context = root->context;

    for (size_t i = 0; i < root->n_domains; i++) {
        FC_TRY(root_drop_ahead(root, root->domains[i]));
        fc_domain_fail(root->domains[i]);
        fc_exchange_reset(root->domains[i]);
    }
    for (size_t i = 0; i < root->n_modules; i++) {
        fc_root_module *module = root->modules[i];

        root->ops->forget_members(module->owner);
        (void)fc_training_move(&module->training, FC_TRAINING_ENDED);
        FOR_EACH_UNIT(unit, module)
        {
            FC_TRY(reset_unit(root->ops, unit, drops_gradients));
        }
    }
    if (root->schedule != NULL) {
        FC_TRY(drops_gradients ? fc_schedule_reset(root->schedule)
                               : fc_schedule_end_forward(root->schedule));
    }
    if (drops_gradients) {
        context->ending = FC_ENDING_OPEN;
        context->is_unfinalized = false;
    }
    root->opener = NULL;
    root->has_raised = root->defers_hooks = false;
    context->awaits_end = context->is_failed = false;
    return FC_OK;
}
