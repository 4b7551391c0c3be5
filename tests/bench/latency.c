/* Test shim for LD_PRELOAD: opening a file below HPML_SLOW_ROOT for reading takes 1 ms longer, as
   a busy metadata server makes it. Directories and files that are created are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static void wait_for(int dir, const char *path, int flags)
{
    const char *root = getenv("HPML_SLOW_ROOT");
    char link[64], base[PATH_MAX];
    const char *where = path;
    if (!root || flags & (O_CREAT | O_DIRECTORY | O_WRONLY | O_RDWR))
        return;
    if (path[0] != '/') {
        ssize_t count;
        if (dir == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        count = readlink(link, base, sizeof base - 1);
        if (count < 0)
            return;
        base[count] = 0;
        where = base;
    }
    if (strncmp(where, root, strlen(root)) == 0) {
        struct timespec delay = {0, 1000000};
        nanosleep(&delay, NULL);
    }
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        static int (*real)(const char *, int, ...); \
        MODE(flags) \
        if (!real) \
            real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        wait_for(AT_FDCWD, path, flags); \
        return real(path, flags, mode); \
    }

#define OPENAT(name) \
    int name(int dir, const char *path, int flags, ...) \
    { \
        static int (*real)(int, const char *, int, ...); \
        MODE(flags) \
        if (!real) \
            real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        wait_for(dir, path, flags); \
        return real(dir, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

/* what programs call that were compiled with _FORTIFY_SOURCE */
#define OPEN_2(name, real) \
    int name(const char *path, int flags) { return real(path, flags); }
#define OPENAT_2(name, real) \
    int name(int dir, const char *path, int flags) { return real(dir, path, flags); }

OPEN_2(__open_2, open)
OPEN_2(__open64_2, open64)
OPENAT_2(__openat_2, openat)
OPENAT_2(__openat64_2, openat64)
