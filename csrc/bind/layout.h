// How DTensors are laid out, and the plain memory that they have on this rank.
#ifndef FC_BIND_LAYOUT_H
#define FC_BIND_LAYOUT_H

#include "bind/python.h"

#include <ATen/core/Tensor.h>

#include <unordered_set>
#include <vector>

namespace fc {

// DTensors on one mesh with the same placements. Specs that were compared once are known again.
class Layout {
public:
    explicit Layout(PyObject *spec);
    bool has(PyObject *spec);

private:
    void remember(PyObject *spec);

    Ref mesh_, placements_;
    std::unordered_set<PyObject *> known_;
    std::vector<Ref> kept_;
};

// A tensor that is memory of this process, or of a GPU, and nothing more.
bool is_ordinary(PyObject *object);
bool is_plain(PyObject *object); // of this process

bool is_dtensor(PyObject *object); // and no subclass

// Where objects of a class keep what one of its __slots__ names; TypeError if none does.
uint16_t slot_of(PyTypeObject *type, PyObject *name);
PyObject *in_slot(PyObject *object, uint16_t slot); // borrowed; null after `del`

Ref spec_of(PyObject *dtensor);

// The tensor that a DTensor in the layout has here, or without a layout `object` itself; null if it
// is another thing.
Ref local_of(PyObject *object, Layout *layout);

// The same where it is flat float32 memory; else undefined.
at::Tensor floats_of(PyObject *object, Layout *layout);

void bump_version(const at::Tensor &tensor);

} // namespace fc

// Once, before all of these; -1 with the Python error set.
int fc_find_dtensors();

#endif
