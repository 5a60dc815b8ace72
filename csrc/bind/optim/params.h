// The parameters of an optimizer's group: steps over their local tensors, or these as lists.
#ifndef FC_BIND_OPTIM_PARAMS_H
#define FC_BIND_OPTIM_PARAMS_H

#include "bind/python/fields.h"
#include "bind/tensor/layout.h"
#include "optim/optim.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fc {

// The type `_C.Params`.
class OptimizerParams {
public:
    explicit OptimizerParams(Fields &given); // params, sharded: the ids of those to step
    bool is_for(PyObject *params) const;
    bool step_adam(Fields &given);
    bool step_sgd(Fields &given);
    Ref locals(PyObject *lists);
    Ref collect(Fields &given);
    int traverse(visitproc visit, void *arg) const;

private:
    struct Member {
        Ref param;
        bool is_ours; // to step
        int layout;
    };
    using Objects = std::vector<PyObject *>; // borrowed

    template <typename Take>
    bool each_with_gradient(PyObject *state, const std::vector<Ref> &keys, Take take);
    bool step(PyObject *state, const fc_optim_rule &rule);
    bool add(const Member &row, const Objects &values, const fc_optim_rule &rule);
    bool add_count(PyObject *step, const fc_adam_options &options);
    bool add_written(PyObject *object, int layout, at::IntArrayRef sizes, float *&memory);
    void forget();
    bool row_locals(const Member &row, const Objects &values, std::vector<Ref> &locals);

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
