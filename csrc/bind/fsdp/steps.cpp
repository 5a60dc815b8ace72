// Counts the steps of optimizers: of all of them, and each one's in a StepCounter.
#include "bind/fsdp/steps.h"

#include "bind/fsdp/unit.h"
#include "bind/python/objects.h"
#include "bind/python/process.h"
#include "bind/python/python.h"

#include <algorithm>

namespace fc {

namespace {

using Counter = std::shared_ptr<uint64_t>;
PyTypeObject *counter_type = nullptr;

PyObject *counter_new(PyTypeObject *type, PyObject *, PyObject *)
{
    return guarded([&] {
        return make_owner(type, std::make_unique<Counter>(std::make_shared<uint64_t>(0))).release();
    });
}

PyObject *counter_count(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        ++*owned<Counter>(self);
        process.n_steps++;
        Unit::note_step();
        Py_RETURN_NONE;
    });
}

PyMethodDef counter_methods[] = {
    {"count", counter_count, METH_NOARGS, "count(): the optimizer has stepped."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot counter_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(counter_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(free_owner<Counter>)},
    {Py_tp_methods, counter_methods},
    {Py_tp_doc, const_cast<char *>("How often one optimizer has stepped.")},
    {0, nullptr}};
PyType_Spec counter_spec = {"fsdp_c._C.StepCounter", sizeof(Owning<Counter>), 0, Py_TPFLAGS_DEFAULT,
                            counter_slots};

} // namespace

uint64_t n_steps()
{
    return process.n_steps;
}

void Updates::follow(const Counter &counter)
{
    const auto is_it = [&](const auto &known) { return known.first == counter; };
    if (std::none_of(counters_.begin(), counters_.end(), is_it)) {
        counters_.emplace_back(counter, *counter);
        process.n_changes++;
    }
}

void Updates::count_load()
{
    n_loads_++;
    process.n_changes++;
}

uint64_t Updates::n() const
{
    uint64_t sum = n_loads_;
    for (const auto &[counter, before] : counters_) {
        sum += *counter - before;
    }
    return sum;
}

Updates::Counter counter_of(PyObject *object)
{
    if (!PyObject_TypeCheck(object, counter_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a StepCounter");
        throw_python();
    }
    return owned<Counter>(object);
}

} // namespace fc

PyObject *fc_count_step(PyObject *, PyObject *)
{
    fc::process.n_steps++;
    Py_RETURN_NONE;
}

PyObject *fc_n_steps(PyObject *, PyObject *)
{
    return PyLong_FromUnsignedLongLong(fc::n_steps());
}

int fc_register_steps(PyObject *module)
{
    return fc::add_type(module, "StepCounter", &fc::counter_spec, &fc::counter_type);
}
