/* Where the libraries lie that tests open: beside the programs. */
#ifndef FC_TESTS_LIBRARY_PATH_H
#define FC_TESTS_LIBRARY_PATH_H

#include "check.h"

#include <limits.h>
#include <unistd.h>

/* `out` has room for PATH_MAX bytes. */
static inline void library_path(const char *name, char *out)
{
    char folder[PATH_MAX - 64];
    ssize_t n = readlink("/proc/self/exe", folder, sizeof(folder) - 1);

    CHECK_OR_EXIT(n > 0);
    folder[n] = '\0';
    *strrchr(folder, '/') = '\0';
    (void)snprintf(out, PATH_MAX, "%s/%s", folder, name);
}

#endif
