// Keeps torch.compile out of the hooks, which it runs in the middle of what it compiles.
#ifndef FC_BIND_PYTHON_UNTRACED_H
#define FC_BIND_PYTHON_UNTRACED_H

#include "bind/python/calls.h"

namespace fc {

// Whether torch.compile, or who else, looks at each Python frame before it runs.
inline bool is_frame_evaluation_replaced()
{
    return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) !=
           _PyEval_EvalFrameDefault;
}

// While it lives, Python code runs as it is written; a comparison where nothing is compiled.
class Untraced : NoCopy {
public:
    Untraced()
    {
        if (is_frame_evaluation_replaced()) {
            before_ = set_tracer(Py_None);
        }
    }
    // Whether what torch.compile has made is running, and goes on with what the hook returns.
    bool is_in_compiled() const { return before_ && before_.get() != Py_None; }
    ~Untraced()
    {
        if (before_) {
            restore();
        }
    }

private:
    static Ref set_tracer(PyObject *tracer) // returns the one before
    {
        static PyObject *const set_eval_frame = look_up(Import::set_eval_frame).release();
        return checked(PyObject_CallOneArg(set_eval_frame, tracer));
    }
    void restore()
    {
        const ErrorAside error; // the hook's, if it has one
        if (!succeeds([&] { set_tracer(before_.get()); })) {
            PyErr_WriteUnraisable(before_.get());
        }
    }

    Ref before_;
};

} // namespace fc

#endif
