/* The course of a root's steps: which phase is open, what each unit does in it, and when.
 *
 * A root is one module and those below it, in order; each may have a unit, or several, one for each
 * mesh that its parameters are sharded over: forward and backward reach them in order, and backward
 * passes them the other way round. The domains of these units open and close their phases together:
 * all are marked closed before one of them is waited for, those of shards before those of replicas,
 * and so are sums finished.
 *
 * In a backward a unit is *reached* when its parameters are needed, and *passed* when its gradients
 * are there. A unit that forward has entered several times is reduced when it was passed as often.
 * The end of the backward looks at all units for what is left: those that were not passed, or not
 * as often as they were entered, and those with gradients or parameters that came later. A unit of
 * which nothing is left is *finished* when it is passed; while all units are, and none is used
 * again, the end does not look at them one by one.
 *
 * Backwards end by themselves, or by hand: then what was not passed waits for
 * fc_root_finalize_backward().
 *
 * What needs the caller goes through `fc_root_ops`. An operation may fail, with FC_ERR_INTERRUPTED
 * and an error that the caller keeps. A failure within a phase ends it for the peers at once
 * (fc_root_fail); this rank is put right by fc_root_reset() before its next step.
 *
 * Ownership: modules, units and contexts lie in the caller's objects, which outlive the root's use
 * of them. Threading: serialized.
 */
#ifndef FC_ENGINE_ROOT_H
#define FC_ENGINE_ROOT_H

#include "base/status.h"
#include "engine/domain.h"
#include "engine/reduction.h"
#include "engine/schedule.h"
#include "engine/training.h"
#include "engine/updates.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_root_course fc_root_course;
typedef struct fc_root_unit fc_root_unit;

/* One unit. Settings may change at any time; an all-zero one has the wrong ones, see
 * fc_root_unit_init. */
struct fc_root_unit {
    void *owner;             /* the caller's, passed to operations */
    fc_reduction *reduction; /* borrowed; NULL: the unit is not bound, and has no part in a step */
    fc_root_unit *next;      /* borrowed; another one of the same module, in another domain */
    fc_training training;
    /* Settings. */
    bool reduce_grads;           /* false: gradients are accumulated */
    bool all_reduce_grads;       /* false: sums wait for the replicas */
    bool reshard_after_backward; /* false: parameters stay for the next forward */
    bool reduce_unused;          /* parameters without a gradient take part with zeros */
    bool unshard_in_backward;    /* false: backward has to do without parameters */
    bool force_sum;              /* passed on in the options of reductions */
    /* State. */
    bool is_pending;      /* gradients of a backward that went by are still to be reduced */
    bool defers_hooks;    /* hooks of its gradients run at the end of the phase */
    int n_entered;        /* in forwards of this step whose backward is still to come */
    int n_passed;         /* in this backward */
    uint64_t finished_in; /* the root's backward in which it was finished last */
    fc_traffic past;      /* of the reductions that were bound before */
    fc_updates updates;   /* of its shards, whatever reduction is bound */
    bool owns_input;      /* one tensor, which only the unit reads: who made it can end the unit */
    uint64_t input_seen_in; /* the root's backward that has shown this; 0: none has yet */
};

/* A module, or several that share a unit. */
typedef struct fc_root_module {
    void *owner;        /* the caller's */
    fc_root_unit *unit; /* borrowed, the first one; NULL: no parameters */
    bool is_grouped;    /* stands for several modules */
    fc_training training;
    uint64_t backward; /* of the root, in which it was reached */
} fc_root_module;

/* Who ends a backward, settled when it starts. */
typedef enum fc_root_ending {
    FC_ENDING_OPEN, /* no backward since the last end */
    FC_ENDING_AUTOMATIC,
    FC_ENDING_MANUAL
} fc_root_ending;

/* What a root's user says of its backwards, and what became of them; passes on to the root that
 * takes a root's place. */
typedef struct fc_root_context {
    bool is_last_backward;
    bool ends_manually; /* what the next backward is to be */
    fc_root_ending ending;
    bool awaits_end;     /* the caller was asked to tell the running backward's end */
    bool is_failed;      /* the last phase was ended by an exception */
    bool is_unfinalized; /* backwards left gradients to fc_root_finalize_backward() */
} fc_root_context;

/* What the caller does. `root`, `module` and `unit` are their owners. */
typedef struct fc_root_ops {
    /* ---- the root's ---- */
    /* Whether a backward runs whose end the caller can tell, see fc_root_end_backward. */
    bool (*is_in_backward)(void *root);
    fc_status (*await_end)(void *root);
    /* Another backward may go through the graph of the one that runs. */
    bool (*keeps_graph)(void *root);
    /* On a device: a forward begins, or a backward does. */
    fc_status (*begin)(void *root);
    fc_status (*resume)(void *root);
    /* ---- a module's ---- */
    /* None of those that a grouped one stands for has run. */
    void (*forget_members)(void *module);
    /* ---- a unit's parameters ---- */
    bool (*publishes)(void *unit); /* shards are not where peers read them */
    fc_status (*publish)(void *unit);
    fc_status (*is_intact)(void *unit, bool *out); /* every shard is where set-up put it */
    fc_status (*note_shards)(void *unit);          /* as they are peers will read them */
    fc_status (*is_stale)(void *unit, bool *out);  /* peers have to read other ones in a backward */
    fc_status (*check_unwritten)(void *unit);
    fc_status (*unshard)(void *unit);
    fc_status (*make_unavailable)(void *unit); /* instead; backward does without them */
    fc_status (*reshard)(void *unit, bool is_news);
    fc_status (*reshard_after_forward)(void *unit, bool in_forward);
    bool (*is_kept_after_forward)(void *unit);
    fc_status (*end_forward)(void *unit);
    fc_status (*keep)(void *unit); /* what stays unsharded outlives the phase */
    bool (*is_unsharded)(void *unit);
    bool (*has_own_memory)(void *unit);    /* what is unsharded does so anyway */
    fc_status (*drop_pending)(void *unit); /* gathers that nobody waited for */
    fc_status (*drop_ahead)(void *unit);   /* that came along with others, and were not used */
    /* ---- a unit's gradients ---- */
    void (*await_gradients)(void *unit);
    bool (*end_awaiting)(void *unit); /* true: they were awaited */
    fc_status (*defer_upcasts)(void *unit, bool reduces);
    fc_status (*end_deferral)(void *unit);
    fc_status (*note_passed)(void *unit);
    fc_status (*accumulate)(void *unit, bool is_news);
    fc_status (*submit)(void *unit, bool with_unused);
    bool (*has_accumulated)(void *unit);
    bool (*has_held)(void *unit);          /* of earlier backwards, full */
    bool (*has_all_gradients)(void *unit); /* the last submission had one of each parameter */
    bool (*is_settled)(void *unit);        /* nothing of it is gathered, nor waits */
    fc_status (*end_graph)(void *unit);    /* no other backward can begin inside of it */
    fc_status (*run_deferred_hooks)(void *unit);
    fc_status (*drop_gradients)(void *unit);
    fc_status (*release_unused)(void *unit); /* memory of those that nobody uses, on a device */
} fc_root_ops;

struct fc_root_course {
    /* Constant after init. */
    void *owner;
    const fc_root_ops *ops;
    fc_root_context *context;
    fc_schedule *schedule; /* borrowed; NULL: not on a device */
    fc_domain **domains;   /* owned */
    size_t n_domains;
    fc_root_module **modules; /* owned; the first one is the root's own */
    size_t n_modules;
    /* In shared memory a rank finds sums when it looks, each at another point of its backward. A
     * hook of a gradient may make a collective, and so may the rest of the backward: all ranks run
     * hooks after the last sum then, in one order. */
    bool finds_sums;
    /* State. */
    fc_root_module *opener; /* began the forward that runs; NULL: none runs */
    uint64_t backward;      /* the number of the running or next one, from 1 */
    size_t n_units;         /* bound ones, as the last forward found them */
    size_t n_finished;      /* of them, in the running backward */
    uint64_t n_reused;      /* of the domains, when that began */
    bool has_grouped;       /* some module is, as the last forward found them */
    bool publishes;         /* some unit does */
    bool defers_hooks;      /* some unit does, in this phase */
    bool has_raised;        /* the forward that runs has ended in an exception */
    fc_updates updates;     /* of all units, as of the last forward's `n_changes` */
    uint64_t n_changes;
};

void fc_root_unit_init(fc_root_unit *unit);
void fc_root_unit_fini(fc_root_unit *unit); /* after it was unbound */
/* Its parameters are those of the reduction's unit from now on, for `owner`; NULL: it has none. */
void fc_root_unit_bind(fc_root_unit *unit, fc_reduction *reduction, void *owner);
/* How the unit's gradients are reduced. `factor`: what their sum is divided by, 0: the number of
 * ranks that add to it; packed collectives divide themselves. */
fc_reduce_options fc_root_unit_options(const fc_root_unit *unit, double factor);
/* `root` has this module, which has this unit and those behind it (or NULL): what is known of
 * another root's backwards is forgotten. */
void fc_root_module_join(fc_root_module *module, fc_root_unit *unit, bool is_grouped);
/* Where it is: what a backward has reached is idle when that ends. `root` NULL: none. */
fc_training fc_root_module_training(const fc_root_module *module, const fc_root_course *root);
/* A unit is gathered: it was finished in vain if it was. */
void fc_root_note_use(fc_unit *unit);

/* Copies the lists; `owner`, `ops`, `context`, `schedule` are set by the caller. */
FC_MUST_CHECK fc_status fc_root_init(fc_root_course *root, fc_domain *const *domains,
                                     size_t n_domains, fc_root_module *const *modules,
                                     size_t n_modules);
/* It has neither modules nor domains any more; fine after it was done, or on zeros. */
void fc_root_fini(fc_root_course *root);

/* True while a forward or backward phase is open. */
bool fc_root_is_open(const fc_root_course *root);
bool fc_root_in_backward(const fc_root_course *root);
/* Whether others look at the collectives of any unit. */
bool fc_root_is_visible(const fc_root_course *root);
/* Whether nothing of a forward, or of a backward that is still to come, would be lost. */
bool fc_root_is_between_steps(const fc_root_course *root);

/* ---- forward ---- */

/* Whether the forward that runs was left by an exception, since `module` is entered again. */
bool fc_root_was_left(const fc_root_course *root, const fc_root_module *module);
/* Before a forward: finds out what passes over all units can be left out, and takes the shards for
 * those that peers will read. False: some shard is not where set-up put it. */
FC_MUST_CHECK fc_status fc_root_take_shards(fc_root_course *root, bool *is_intact_out);
/* `module` begins a forward, whose graph is kept for a backward or not. `n_changes` is another one
 * than before if some unit's updates have changed in another way than by a step. */
FC_MUST_CHECK fc_status fc_root_open_forward(fc_root_course *root, fc_root_module *module,
                                             bool keeps_graph, uint64_t n_changes);
/* Forward is through `unit`. `recomputes`: within a backward; `stays`: the caller's wish, for
 * units that run forward for the first time; `is_needed`: whoever runs it. */
FC_MUST_CHECK fc_status fc_root_leave_unit(fc_root_course *root, fc_root_unit *unit,
                                           bool recomputes, bool stays, bool is_needed);
/* Closes the forward's phase; nothing else if it runs within a backward. */
FC_MUST_CHECK fc_status fc_root_end_forward(fc_root_course *root, bool keeps_graph);
/* A call of `module` ended in an exception, and with it the forward, if it began there: tells peers
 * at once. */
void fc_root_note_raised(fc_root_course *root, const fc_root_module *module);

/* ---- backward ---- */

/* Opens the phase, unless it is open. */
FC_MUST_CHECK fc_status fc_root_begin_backward(fc_root_course *root);
/* The caller will tell the end of the backward that runs. */
void fc_root_note_awaited(fc_root_course *root);
/* Backward is about to need the module's parameters. True in `is_news_out`: call
 * fc_root_enter_backward for its units, but for those that are in FC_TRAINING_PRE_BACKWARD. */
FC_MUST_CHECK fc_status fc_root_reach(fc_root_course *root, fc_root_module *module,
                                      bool *is_news_out);
FC_MUST_CHECK fc_status fc_root_enter_backward(fc_root_course *root, fc_root_unit *unit);
/* The unit's gradients are there. */
FC_MUST_CHECK fc_status fc_root_pass(fc_root_course *root, fc_root_unit *unit);
/* Whether the backward that runs is one that shows what the unit's input is: the first one that
 * comes to it, each time. If so: whether it is one tensor that only the unit reads. */
bool fc_root_asks_for_input(const fc_root_course *root, const fc_root_unit *unit);
void fc_root_note_input(const fc_root_course *root, fc_root_unit *unit, bool is_own);
/* After that, where no gradient of the unit can come any more: it may be finished. */
void fc_root_finish(fc_root_course *root, fc_root_unit *unit);
/* Reduces what is left, finishes all reductions and closes the phase. */
FC_MUST_CHECK fc_status fc_root_end_backward(fc_root_course *root);
/* Reduces what backwards that end by hand have left. */
FC_MUST_CHECK fc_status fc_root_finalize_backward(fc_root_course *root);

/* ---- failure ---- */

/* The running phase ended in an exception: tells peers at once. */
void fc_root_fail(fc_root_course *root);
/* Drops everything of the running step. A forward that was left by an exception leaves gradients,
 * and units that were unsharded by hand, alone. */
FC_MUST_CHECK fc_status fc_root_reset(fc_root_course *root, bool drops_gradients);

#ifdef __cplusplus
}
#endif
#endif
