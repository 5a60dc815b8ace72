// Takes torch.compile's callback off the thread and puts it back.
#include "bind/python/untraced.h"

#include "bind/python/calls.h"

namespace fc {

Ref Untraced::set_tracer(PyObject *tracer)
{
    static PyObject *set_eval_frame = nullptr;
    if (set_eval_frame == nullptr) {
        set_eval_frame = look_up(Import::set_eval_frame).release();
    }
    return checked(PyObject_CallOneArg(set_eval_frame, tracer));
}

void Untraced::restore()
{
    PyObject *type, *value, *traceback; // of the hook's error, if it has one
    PyErr_Fetch(&type, &value, &traceback);
    try {
        set_tracer(before_.get());
    } catch (python_error &error) {
        error.restore();
        PyErr_WriteUnraisable(before_.get());
    }
    PyErr_Restore(type, value, traceback);
}

} // namespace fc
