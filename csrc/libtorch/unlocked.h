// The lock of the interpreter that the program runs in, if it runs in one.
#ifndef FC_LIBTORCH_UNLOCKED_H
#define FC_LIBTORCH_UNLOCKED_H

namespace fc {

// How a thread lets go of the lock of the interpreter that it may hold, and takes what it had.
// Whoever embeds this says it before all else.
struct InterpreterLock {
    void *(*leave)() = [] { return static_cast<void *>(nullptr); };
    void (*enter)(void *left) = [](void *) {};
};
inline InterpreterLock interpreter_lock;

// While it lives, other threads of the interpreter run.
class Unlocked {
public:
    Unlocked() : left_(interpreter_lock.leave()) {}
    ~Unlocked() { interpreter_lock.enter(left_); }
    Unlocked(const Unlocked &) = delete;
    Unlocked &operator=(const Unlocked &) = delete;

private:
    void *left_;
};

} // namespace fc

#endif
