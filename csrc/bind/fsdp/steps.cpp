// Counts the steps of optimizers: of all of them, and each one's in a StepCounter.
#include "bind/fsdp/state.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/python/process.h"

namespace fc {

namespace {

void counter_count(StepCounter &counter)
{
    fc_step_counter_count(counter.core.get());
    process.n_steps++;
    Unit::note_step();
}

PyMethodDef counter_methods[] = {
    method<counter_count>("count", "count(): the optimizer has stepped."), {}};

} // namespace

int register_steps(PyObject *module)
{
    return add_type<StepCounter>(module, {.name = "fsdp_c._C.StepCounter",
                                          .doc = "How often one optimizer has stepped.",
                                          .methods = counter_methods});
}

} // namespace fc
