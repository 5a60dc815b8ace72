// The type `_C.Params`.
#include "bind/module.h"
#include "bind/optim/params.h"
#include "bind/python/objects.h"

namespace fc {

namespace {

// The columns of lists, each as long as the first.
std::vector<PyObject *> columns_of(PyObject *lists)
{
    std::vector<PyObject *> columns;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(lists); i++) {
        PyObject *column = PySequence_Fast_GET_ITEM(lists, i);
        if (!PyList_Check(column) ||
            (i > 0 && PyList_GET_SIZE(column) != PyList_GET_SIZE(columns[0]))) {
            raise_error(PyExc_TypeError, "expected lists of one length");
        }
        columns.push_back(column);
    }
    if (columns.size() < 2) {
        raise_error(PyExc_TypeError, "expected parameters and gradients");
    }
    return columns;
}

std::vector<Ref> empty_lists(size_t n)
{
    std::vector<Ref> lists(n);
    for (Ref &list : lists) {
        list = checked(PyList_New(0));
    }
    return lists;
}

bool plan_is_for(OptimizerParams &plan, PyObject *params)
{
    return PyList_Check(params) && plan.is_for(params);
}

Ref plan_locals(OptimizerParams &plan, PyObject *lists)
{
    const Ref all = checked(PySequence_Fast(lists, "expected a list of lists"));
    const std::vector<PyObject *> columns = columns_of(all.get());
    const std::vector<Ref> locals = empty_lists(columns.size());
    const Ref rows = checked(PyList_New(0));
    plan.locals(columns, rows.get(), locals);
    return checked(PyTuple_Pack(2, rows.get(), to_python(locals).get()));
}

Ref plan_collect(OptimizerParams &plan, PyObject *args, PyObject *named)
{
    PyObject *state, *keys;
    parse(args, named, "O!O!:collect", {"state", "keys"}, &PyDict_Type, &state, &PyTuple_Type,
          &keys);
    const std::vector<PyObject *> names(PySequence_Fast_ITEMS(keys),
                                        PySequence_Fast_ITEMS(keys) + PyTuple_GET_SIZE(keys));
    const std::vector<Ref> locals = empty_lists(names.size() + 2);
    return plan.collect(state, names, locals) ? to_python(locals) : Ref::borrow(Py_None);
}

bool plan_step_adam(OptimizerParams &plan, PyObject *args, PyObject *named)
{
    fc_adam_options options;
    PyObject *state;
    int is_decoupled, is_amsgrad, is_maximized;
    Py_ssize_t fused_lanes;
    parse(args, named, "O$dddddpppn:step_adam",
          {"state", "lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay",
           "amsgrad", "maximize", "fused_lanes"},
          &state, &options.lr, &options.beta1, &options.beta2, &options.eps, &options.weight_decay,
          &is_decoupled, &is_amsgrad, &is_maximized, &fused_lanes);
    options.is_decoupled = is_decoupled != 0;
    options.is_maximized = is_maximized != 0;
    return PyDict_Check(state) &&
           plan.step_adam(state, options, is_amsgrad != 0, static_cast<size_t>(fused_lanes));
}

bool plan_step_sgd(OptimizerParams &plan, PyObject *args, PyObject *named)
{
    double lr, momentum, dampening, weight_decay;
    PyObject *state;
    int is_nesterov, is_maximized;
    Py_ssize_t fused_lanes;
    parse(args, named, "O$ddddppn:step_sgd",
          {"state", "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize",
           "fused_lanes"},
          &state, &lr, &momentum, &dampening, &weight_decay, &is_nesterov, &is_maximized,
          &fused_lanes);
    const fc_sgd sgd = {static_cast<float>(weight_decay),
                        static_cast<float>(momentum),
                        static_cast<float>(1 - dampening),
                        static_cast<float>(-lr),
                        is_nesterov != 0,
                        is_maximized != 0};
    return PyDict_Check(state) &&
           plan.step_sgd(state, sgd, momentum != 0, static_cast<size_t>(fused_lanes));
}

PyMethodDef plan_methods[] = {
    method<plan_is_for>("is_for", "is_for(params) -> bool: whether it was made for this list."),
    method<plan_locals>(
        "locals",
        "locals(columns) -> (rows, columns)\n\nLocal tensors for the rows of an optimizer's lists "
        "(parameters, gradients, state ...)\nwhose DTensors are laid out alike. Scalars and None "
        "stay as they are."),
    method<plan_collect>(
        "collect",
        "collect(state, keys) -> columns or None\n\nLocal tensors of parameters and gradients, and "
        "what the state has under each key, for every\nparameter that has a gradient. None: a "
        "parameter lacks one of them."),
    method<plan_step_adam>(
        "step_adam",
        "step_adam(state, *, lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, amsgrad, "
        "maximize, fused_lanes) -> bool\n\n"
        "One step of Adam for every parameter that has a gradient. False: torch must do it, "
        "nothing "
        "was touched."),
    method<plan_step_sgd>("step_sgd", "step_sgd(state, *, lr, momentum, dampening, "
                                      "weight_decay, nesterov, maximize, fused_lanes) "
                                      "-> bool\n\n"
                                      "The same for SGD."),
    {}};

} // namespace

int register_optim(PyObject *module)
{
    return add_type<OptimizerParams>(
        module,
        {.name = "fsdp_c._C.Params",
         .doc = "Params(params, sharded)\n--\n\nThe parameters of a group; `sharded` has the "
                "ids of those to step here.",
         .methods = plan_methods});
}

} // namespace fc
