// The type `_C.Params`.
#include "bind/optim/optim.h"

#include "bind/optim/params.h"
#include "bind/python/objects.h"

namespace fc {

namespace {

OptimizerParams &plan_of(PyObject *self)
{
    return owned<OptimizerParams>(self);
}

PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *)
{
    PyObject *params, *sharded;
    if (!PyArg_ParseTuple(args, "O!O!:Params", &PyList_Type, &params, &PySet_Type, &sharded)) {
        return nullptr;
    }
    return guarded([&] {
        return make_owner(type, std::make_unique<OptimizerParams>(params, sharded)).release();
    });
}

PyObject *plan_is_for(PyObject *self, PyObject *params)
{
    return PyBool_FromLong(PyList_Check(params) && plan_of(self).is_for(params));
}

Ref list_of(const std::vector<Ref> &items)
{
    Ref list = checked(PyList_New(0));
    for (const Ref &item : items) {
        check(PyList_Append(list.get(), item.get()));
    }
    return list;
}

PyObject *plan_locals(PyObject *self, PyObject *lists)
{
    return guarded([&]() -> PyObject * {
        Ref all = checked(PySequence_Fast(lists, "expected a list of lists"));
        std::vector<PyObject *> columns;
        std::vector<Ref> locals;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); i++) {
            PyObject *column = PySequence_Fast_GET_ITEM(all.get(), i);
            if (!PyList_Check(column) ||
                (i > 0 && PyList_GET_SIZE(column) != PyList_GET_SIZE(columns[0]))) {
                PyErr_SetString(PyExc_TypeError, "expected lists of one length");
                throw_python();
            }
            columns.push_back(column);
            locals.push_back(checked(PyList_New(0)));
        }
        if (columns.size() < 2) {
            PyErr_SetString(PyExc_TypeError, "expected parameters and gradients");
            throw_python();
        }
        Ref rows = checked(PyList_New(0));
        plan_of(self).locals(columns, rows.get(), locals);
        return checked(PyTuple_Pack(2, rows.get(), list_of(locals).get())).release();
    });
}

PyObject *plan_collect(PyObject *self, PyObject *args)
{
    PyObject *state, *keys;
    if (!PyArg_ParseTuple(args, "O!O!:collect", &PyDict_Type, &state, &PyTuple_Type, &keys)) {
        return nullptr;
    }
    return guarded([&]() -> PyObject * {
        std::vector<PyObject *> names(PySequence_Fast_ITEMS(keys),
                                      PySequence_Fast_ITEMS(keys) + PyTuple_GET_SIZE(keys));
        std::vector<Ref> locals;
        for (size_t c = 0; c < names.size() + 2; c++) {
            locals.push_back(checked(PyList_New(0)));
        }
        if (!plan_of(self).collect(state, names, locals)) {
            Py_RETURN_NONE;
        }
        return list_of(locals).release();
    });
}

PyObject *plan_step_adam(PyObject *self, PyObject *args)
{
    fc_adam_options options;
    PyObject *state;
    int is_decoupled, is_amsgrad, is_maximized;
    Py_ssize_t fused_lanes;
    if (!PyArg_ParseTuple(args, "Odddddpppn:step_adam", &state, &options.lr, &options.beta1,
                          &options.beta2, &options.eps, &options.weight_decay, &is_decoupled,
                          &is_amsgrad, &is_maximized, &fused_lanes)) {
        return nullptr;
    }
    if (!PyDict_Check(state)) {
        Py_RETURN_FALSE;
    }
    options.is_decoupled = is_decoupled != 0;
    options.is_maximized = is_maximized != 0;
    return guarded([&] {
        return PyBool_FromLong(plan_of(self).step_adam(state, options, is_amsgrad != 0,
                                                       static_cast<size_t>(fused_lanes)));
    });
}

PyObject *plan_step_sgd(PyObject *self, PyObject *args)
{
    double lr, momentum, dampening, weight_decay;
    PyObject *state;
    int is_nesterov, is_maximized;
    Py_ssize_t fused_lanes;
    if (!PyArg_ParseTuple(args, "Oddddppn:step_sgd", &state, &lr, &momentum, &dampening,
                          &weight_decay, &is_nesterov, &is_maximized, &fused_lanes)) {
        return nullptr;
    }
    if (!PyDict_Check(state)) {
        Py_RETURN_FALSE;
    }
    const fc_sgd sgd = {static_cast<float>(weight_decay),
                        static_cast<float>(momentum),
                        static_cast<float>(1 - dampening),
                        static_cast<float>(-lr),
                        is_nesterov != 0,
                        is_maximized != 0};
    return guarded([&] {
        return PyBool_FromLong(
            plan_of(self).step_sgd(state, sgd, momentum != 0, static_cast<size_t>(fused_lanes)));
    });
}

PyMethodDef plan_methods[] = {
    {"is_for", plan_is_for, METH_O, "is_for(params) -> bool: whether it was made for this list."},
    {"locals", plan_locals, METH_O,
     "locals(columns) -> (rows, columns)\n\nLocal tensors for the rows of an optimizer's lists "
     "(parameters, gradients, state ...)\nwhose DTensors are laid out alike. Scalars and None "
     "stay as they are."},
    {"collect", plan_collect, METH_VARARGS,
     "collect(state, keys) -> columns or None\n\nLocal tensors of parameters and gradients, and "
     "what the state has under each key, for every\nparameter that has a gradient. None: a "
     "parameter lacks one of them."},
    {"step_adam", plan_step_adam, METH_VARARGS,
     "step_adam(state, lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, "
     "fused_lanes) -> bool\n\n"
     "One step of Adam for every parameter that has a gradient. False: torch must do it, nothing "
     "was touched."},
    {"step_sgd", plan_step_sgd, METH_VARARGS,
     "step_sgd(state, lr, momentum, dampening, weight_decay, nesterov, maximize, fused_lanes) -> "
     "bool\n\n"
     "The same for SGD."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot plan_slots[] = {
    {Py_tp_doc, const_cast<char *>("Params(params, sharded)\n--\n\nThe parameters of a group; "
                                   "`sharded` has the ids of those to step here.")},
    {Py_tp_new, reinterpret_cast<void *>(plan_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(free_traversed<OptimizerParams>)},
    {Py_tp_traverse, reinterpret_cast<void *>(traverse_owner<OptimizerParams>)},
    {Py_tp_clear, reinterpret_cast<void *>(clear_owner<OptimizerParams>)},
    {Py_tp_methods, plan_methods},
    {0, nullptr}};

PyType_Spec plan_spec = {"fsdp_c._C.Params", sizeof(Owning<OptimizerParams>), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plan_slots};

} // namespace

} // namespace fc

int fc_register_optim(PyObject *module)
{
    PyTypeObject *type;
    return fc_intern_optimizer_keys() < 0 ? -1
                                          : fc::add_type(module, "Params", &fc::plan_spec, &type);
}
