// What Python makes of a unit's parameters: the chunks that a gather sends, and whole parameters of
// what it brought. See [Note: inputs] in engine/layout.h.
#ifndef FC_BIND_FSDP_EXTENDED_H
#define FC_BIND_FSDP_EXTENDED_H

#include "bind/fsdp/parameters.h"

namespace fc {

// All-gather extensions, and shards without memory of their own.
class Extended {
public:
    // rows: as for Parameters.
    Extended(Parameters &of, PyObject *rows);

    bool has_extensions() const { return !extensions_.empty(); }

    // ---- see fc_unsharding_ops ----
    void show(void *memory) const;
    void hide();
    void shards(const void **shards_out) const;
    void mark(uint64_t *marks_out) const;
    size_t find_changed(const uint64_t *marks, size_t from) const;
    void make();
    void fill();
    void forget();

private:
    struct Output { // of an input: all ranks' chunks, which an extension gets
        at::Tensor tensor;
        size_t at, bytes; // in the unsharded buffer
    };
    struct Extension {
        size_t param;
        std::vector<at::Tensor> inner; // memory that its whole parameter is made of
        bool has_names = false;        // who reads it in vain is told of the unit
    };
    uint64_t mark_of(size_t param) const;
    void take_outputs(PyObject *tensors);
    void note_inner(Extension &extension);
    void name_reader(const at::Tensor &tensor) const;

    Parameters &of_;
    const fc_layout *layout_;
    std::vector<Output> outputs_;
    std::vector<Extension> extensions_;
    std::vector<at::Tensor> made_; // by entry of the layout
};

// Whether Python makes anything of the unit.
bool is_extended(const fc_layout *layout);

} // namespace fc

#endif
