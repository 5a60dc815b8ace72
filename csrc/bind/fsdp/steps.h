// Optimizer steps: what was gathered before the last one is out of date, and ranks whose shards
// have not seen equally many are out of step.
#ifndef FC_BIND_FSDP_STEPS_H
#define FC_BIND_FSDP_STEPS_H

#include <Python.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fc {

// Of all optimizers of this process, and loads.
uint64_t n_steps();

// What the shards of one unit have seen: steps of the optimizers that hold some of them, and loads.
class Updates {
public:
    using Counter = std::shared_ptr<const uint64_t>;

    void follow(const Counter &counter);
    void count_load();
    uint64_t n() const;
    uint64_t n_loads() const { return n_loads_; }
    // Of each optimizer, with what it had counted when it came to hold some.
    const std::vector<std::pair<Counter, uint64_t>> &counters() const { return counters_; }

private:
    std::vector<std::pair<Counter, uint64_t>> counters_; // the optimizers may be gone
    uint64_t n_loads_ = 0;
};

// Borrowed from a StepCounter; TypeError as an exception.
Updates::Counter counter_of(PyObject *object);

} // namespace fc

PyObject *fc_count_step(PyObject *, PyObject *);
PyObject *fc_n_steps(PyObject *, PyObject *);
int fc_register_steps(PyObject *module);

#endif
