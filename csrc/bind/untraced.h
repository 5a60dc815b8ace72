// Keeps torch.compile out of the hooks, which it runs in the middle of what it compiles.
#ifndef FC_BIND_UNTRACED_H
#define FC_BIND_UNTRACED_H

#include "bind/python.h"

namespace fc {

// While it lives, Python code runs as it is written; a comparison where nothing is compiled.
class Untraced {
public:
    Untraced()
    {
        if (_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) !=
            _PyEval_EvalFrameDefault) {
            before_ = set_tracer(Py_None);
        }
    }
    ~Untraced()
    {
        if (before_) {
            restore();
        }
    }
    Untraced(const Untraced &) = delete;
    Untraced &operator=(const Untraced &) = delete;

private:
    static Ref set_tracer(PyObject *tracer); // returns the one before
    void restore();

    Ref before_;
};

} // namespace fc

#endif
