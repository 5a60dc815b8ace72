// The interpreter's end: other threads are through with it before it goes.
#include "base/threads.h"
#include "bind/module.h"
#include "bind/python/python.h"
#include "transport/transport.h"

namespace fc {

void close_interpreter()
{
    constexpr int longest_ms = 1000; // a forked child inherits requests of threads it lacks
    // Threads of gloo's process groups, as torch names them. After a collective they drop its
    // tensors, often once the caller has gone on; if they then hold the last reference, they ask
    // for the GIL, which ends a process that is at its end with "terminate called without an active
    // exception".
    constexpr const char *collective_thread = "pt_gloo_runloop";

    Py_BEGIN_ALLOW_THREADS
    fc_transport_stop_telling();
    Py_END_ALLOW_THREADS
    is_closing = true;
    int n_idle = 0;
    // Twice: a thread that asks for the GIL sleeps, too, gets it here, and goes on.
    for (int i = 0; i < longest_ms && (n_idle < 2 || n_asking > 0); i++) {
        Py_BEGIN_ALLOW_THREADS
        usleep(1000);
        n_idle = fc_threads_any_runs(collective_thread) ? 0 : n_idle + 1;
        Py_END_ALLOW_THREADS
    }
}

} // namespace fc
