// Objects of the core that belong to C++, and objects that stay in their place.
#ifndef FC_BIND_CORE_H
#define FC_BIND_CORE_H

#include <memory>

namespace fc {

// What stays where it was made.
class NoCopy {
public:
    NoCopy() = default;
    NoCopy(const NoCopy &) = delete;
    NoCopy &operator=(const NoCopy &) = delete;
};

template <auto destroy> struct Destroy {
    template <typename T> void operator()(T *object) const { destroy(object); }
};

// Ends with `destroy`, the core's function.
template <typename T, auto destroy> using Owned = std::unique_ptr<T, Destroy<destroy>>;

// Where a function of the core leaves an object that it makes: `check(make(..., Out(owned)))`.
template <typename T, auto destroy> class Out : NoCopy {
public:
    explicit Out(Owned<T, destroy> &owner) : owner_(owner) {}
    ~Out() { owner_.reset(made_); }
    operator T **() { return &made_; }

private:
    Owned<T, destroy> &owner_;
    T *made_ = nullptr;
};
template <typename T, auto destroy> Out(std::unique_ptr<T, Destroy<destroy>> &) -> Out<T, destroy>;

} // namespace fc

#endif
