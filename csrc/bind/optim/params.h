// The parameters of an optimizer's group: steps over their local tensors, or these as lists.
#ifndef FC_BIND_OPTIM_PARAMS_H
#define FC_BIND_OPTIM_PARAMS_H

#include "bind/python/python.h"
#include "bind/tensor/layout.h"
#include "optim/optim.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

namespace fc {

class OptimizerParams {
public:
    // (params, sharded): `sharded` has the ids of those to step.
    OptimizerParams(PyObject *args, PyObject *named);
    bool is_for(PyObject *params) const;
    // Steps every parameter that has a gradient, or none: then false. `fused_lanes`: of fc_optim.
    bool step_adam(PyObject *state, const fc_adam_options &options, bool is_amsgrad,
                   size_t fused_lanes);
    bool step_sgd(PyObject *state, const fc_sgd &sgd, bool has_momentum, size_t fused_lanes);
    // Fills `rows` with the rows of `columns` (lists of one length, the parameters first) that have
    // local tensors throughout, and `locals` with these, column by column.
    void locals(const std::vector<PyObject *> &columns, PyObject *rows,
                const std::vector<Ref> &locals);
    // Fills `locals` with parameters, gradients and what `state` has under each of `keys`, for
    // every parameter that has a gradient, and counts versions; false: one of these parameters has
    // no local tensors throughout.
    bool collect(PyObject *state, const std::vector<PyObject *> &keys,
                 const std::vector<Ref> &locals);
    int traverse(visitproc visit, void *arg) const;

private:
    struct Member {
        Ref param;
        bool is_ours; // to step
        int layout;
    };
    // What an optimizer keeps of a parameter, as in fc_optim_param. Null: it has none.
    using StateObjects = std::array<PyObject *, 3>;

    bool row_locals(const Member &member, const std::vector<PyObject *> &values,
                    std::vector<Ref> &locals);
    template <typename Collect, typename Run>
    bool step(PyObject *state, Collect collect_row, Run run);
    bool collect_adam(const Member &row, PyObject *own, const fc_adam_options &options,
                      bool is_amsgrad);
    bool collect_sgd(const Member &row, PyObject *own);
    bool add(const Member &row, const StateObjects &state);
    bool add_written(PyObject *object, int layout, at::IntArrayRef sizes, float *&memory);
    void forget();

    std::vector<Member> rows_;
    DTensorLayouts layouts_;
    bool is_running_ = false;
    // Of the running step; empty between steps, so that nobody's tensors are kept.
    std::vector<fc_optim_param> stepped_;
    std::vector<at::Tensor> steps_, grads_, written_; // written: their versions count
    double last_step_ = 0;                            // that `numbers_` belong to
    fc_adam numbers_{};
};

} // namespace fc

#endif
