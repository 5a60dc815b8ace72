// Gradients of whole parameters, as autograd leaves them: for this backward or a later one.
#ifndef FC_BIND_FSDP_ACCUMULATED_H
#define FC_BIND_FSDP_ACCUMULATED_H

#include "bind/fsdp/parameters.h"

namespace fc {

class Accumulated {
public:
    explicit Accumulated(std::vector<Param> &params);

    // Whether the newest submission had a gradient of each parameter, of its backward.
    bool has_all_gradients() const { return has_all_; }
    // A backward goes through the unit. True from then on if none of its parameters has had a
    // gradient since.
    bool awaits_gradients() const { return awaits_; }
    // See fc_reduction_ops.
    size_t find_frozen(size_t from) const;
    // Fresh gradients stay as narrow as they are, unless they are the first of several to be added
    // up; from pre-backward to post-backward.
    void defer_upcasts(bool reduces);
    void end_deferral();
    // What micro-batches have left beside the unsharded parameter (before torch 2.15).
    const at::Tensor &accumulated(size_t param) const { return whole_[param].accumulated; }
    // ValueError unless it is the parameter's size in the reduce dtype; an undefined one clears.
    void set_accumulated(size_t param, const at::Tensor &tensor);

protected:
    void await() { awaits_ = true; }
    // Keeps what a backward has left for a later one. True if there was something.
    bool keep_gradients();
    // Of each parameter; undefined: none. Zeros for unused ones if `with_unused`, and for those of
    // which `sums` (null: none) has a partial sum.
    Tensors take_gradients(bool with_unused, const fc_reduction *sums);
    bool has_gradients() const;
    bool has_held() const { return has_kept_; } // of earlier backwards
    // Those of a unit in whose place this one comes, in the dtypes of this one.
    void take_from(Accumulated &former);
    void drop();

private:
    std::vector<Param> &whole_;
    bool awaits_ = false;
    bool has_widened_ = false; // a parameter whose gradients are wider than it is
    bool has_kept_ = false;    // for the next submission
    bool has_all_ = false;
    bool has_absent_ = false;
};

} // namespace fc

#endif
