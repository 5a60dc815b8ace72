// The interpreter's end: other threads are through with it before it goes.
#include "bind/python/shutdown.h"

#include "bind/python/python.h"
#include "transport/transport.h"

#include <cstdio>
#include <cstring>
#include <dirent.h>
#include <string>

namespace fc {

namespace {

// Threads of gloo's process groups, as torch names them. After a collective they drop its tensors,
// often once the caller has gone on; if they then hold the last reference, they ask for the GIL,
// which ends a process that is at its end with "terminate called without an active exception".
constexpr const char *collective_thread = "(pt_gloo_runloop)";

// Whether a thread of this process is one of them and has something to do: it sleeps otherwise.
bool is_busy(const char *task)
{
    char text[128] = "";
    FILE *file = std::fopen(("/proc/self/task/" + std::string(task) + "/stat").c_str(), "r");
    if (file == nullptr) {
        return false; // it has ended
    }
    (void)!std::fgets(text, sizeof text, file);
    (void)std::fclose(file);
    const char *name = std::strstr(text, collective_thread);
    return name != nullptr && std::strncmp(name + std::strlen(collective_thread), " R", 2) == 0;
}

bool any_is_busy()
{
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == nullptr) {
        return false;
    }
    bool found = false;
    while (const dirent *task = readdir(tasks)) {
        found = found || (task->d_name[0] != '.' && is_busy(task->d_name));
    }
    (void)closedir(tasks);
    return found;
}

} // namespace

} // namespace fc

PyObject *fc_close(PyObject *, PyObject *)
{
    constexpr int longest_ms = 1000; // a forked child inherits requests of threads it lacks

    Py_BEGIN_ALLOW_THREADS
    fc_transport_stop_telling();
    Py_END_ALLOW_THREADS
    fc::is_closing = true;
    int n_idle = 0;
    // Twice: a thread that asks for the GIL sleeps, too, gets it here, and goes on.
    for (int i = 0; i < longest_ms && (n_idle < 2 || fc::n_asking > 0); i++) {
        Py_BEGIN_ALLOW_THREADS
        usleep(1000);
        n_idle = fc::any_is_busy() ? 0 : n_idle + 1;
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}
