// Counts the steps of optimizers: of all of them, and each one's in a StepCounter.
#include "bind/fsdp/steps.h"

#include "bind/core.h"
#include "bind/fsdp/unit.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/python/process.h"
#include "bind/python/python.h"

namespace fc {

namespace {

struct StepCounter {
    StepCounter() { check(fc_step_counter_create(Out(core))); }
    Owned<fc_step_counter, fc_step_counter_release> core;
};

void counter_count(StepCounter &counter)
{
    fc_step_counter_count(counter.core.get());
    process.n_steps++;
    Unit::note_step();
}

PyMethodDef counter_methods[] = {
    method<counter_count>("count", "count(): the optimizer has stepped."), {}};

} // namespace

uint64_t n_steps()
{
    return process.n_steps;
}

fc_step_counter *counter_of(PyObject *object)
{
    return owned_by<StepCounter>(object, "a StepCounter").core.get();
}

int register_steps(PyObject *module)
{
    return add_type<StepCounter>(module, {.name = "fsdp_c._C.StepCounter",
                                          .doc = "How often one optimizer has stepped.",
                                          .methods = counter_methods});
}

} // namespace fc
