/* Whoever opens /proc/PID/status gets a copy with the machine's CPUs and domains; of numa_maps, with
 * the recorded memory policy. */
#define STATUS_MAX 16384

static size_t put_mask(char *to, size_t size, const uint64_t *bits, int count) {
    size_t used = 0;
    for (int group = (count + 31) / 32 - 1; group >= 0; group--)
        used += (size_t)snprintf(to + used, size - used, group ? "%08x," : "%08x",
                                 (unsigned)(bits[group / 2] >> group % 2 * 32));
    return used;
}

static size_t put_list(char *to, size_t size, const uint64_t *bits, int count) {
    size_t used = 0;
    to[0] = 0;
    for (int at = 0, first; at < count; at++) {
        if (!(bits[at / WORD_BITS] >> at % WORD_BITS & 1)) continue;
        for (first = at; at + 1 < count && bits[(at + 1) / WORD_BITS] >> (at + 1) % WORD_BITS & 1;)
            at++;
        used += (size_t)snprintf(to + used, size - used, used ? ",%d" : "%d", first);
        if (at > first) used += (size_t)snprintf(to + used, size - used, "-%d", at);
    }
    return used;
}

/* One line of the status with the machine's value, or 0 for a line to be kept. */
static size_t changed(char *to, size_t size, const char *line, size_t length,
                      const record_t *record) {
    static const char *names[] = {"Cpus_allowed:\t", "Cpus_allowed_list:\t", "Mems_allowed:\t",
                                  "Mems_allowed_list:\t"};
    const uint64_t domains = ALL_DOMAINS;
    for (int which = 0; which < 4; which++) {
        size_t name = strlen(names[which]);
        if (length < name || strncmp(line, names[which], name) != 0) continue;
        memcpy(to, names[which], name);
        char *value = to + name;
        size_t room = size - name - 1, used;
        if (which == 0)
            used = put_mask(value, room, record->cpus, VIRTUAL_CPUS);
        else if (which == 1)
            used = put_list(value, room, record->cpus, VIRTUAL_CPUS);
        else if (which == 3)
            used = put_list(value, room, &domains, VIRTUAL_DOMAINS);
        else { /* as wide as the kernel has it: libnuma takes the width for a fact */
            used = length - name;
            if (used < 17 || used > room) return 0;
            memcpy(value, line + name, used);
            char last[20];
            put_mask(last, sizeof last, &domains, 64);
            memcpy(value + used - 17, last, 17);
        }
        value[used] = '\n';
        return name + used + 1;
    }
    return 0;
}

/* The file behind a descriptor becomes a copy in memory. The number stays: the caller may count on
 * getting the lowest one. Where anything fails the file stays what it was. */
static void put_in_place(int file, const char *name, const char *copy, size_t size) {
    int flags = fcntl(file, F_GETFD);
    int other = memfd_create(name, flags & FD_CLOEXEC ? MFD_CLOEXEC : 0);
    if (other < 0) return;
    if (write(other, copy, size) == (ssize_t)size && lseek(other, 0, SEEK_SET) == 0)
        dup3(other, file, flags & FD_CLOEXEC ? O_CLOEXEC : 0);
    close(other);
}

/* Returns the descriptor, or in its place one of a copy that shows the machine. */
static int shown(int file) {
    struct statfs system;
    if (file < 0 || fstatfs(file, &system) < 0 || system.f_type != 0x9fa0) return file; /* procfs */
    int error = errno;
    char text[STATUS_MAX], copy[STATUS_MAX];
    ssize_t size = pread(file, text, sizeof text - 1, 0);
    if (size <= 0 || size == sizeof text - 1) return file;
    text[size] = 0;
    char *pid = strstr(text, "\nPid:");
    record_t record;
    if (!pid || !find((pid_t)strtol(pid + 5, NULL, 10), &record)) goto keep;
    size_t used = 0;
    for (char *line = text; *line;) {
        char *end = strchr(line, '\n');
        size_t length = end ? (size_t)(end - line) : strlen(line);
        if (used + length + 64 + 6 * VIRTUAL_CPUS > sizeof copy) goto keep;
        size_t more = changed(copy + used, sizeof copy - used, line, length, &record);
        if (!more) {
            memcpy(copy + used, line, length);
            copy[used + length] = '\n';
            more = length + 1;
        }
        used += more;
        line += length + (end ? 1 : 0);
    }
    put_in_place(file, "status", copy, used);
keep:
    errno = error;
    return file;
}

static int is_status(const char *path, int flags) {
    if (!path || (flags & O_ACCMODE) != O_RDONLY || flags & (O_PATH | O_DIRECTORY)) return 0;
    size_t length = strlen(path);
    return length >= 6 && strcmp(path + length - 6, "status") == 0 &&
           (length == 6 || path[length - 7] == '/');
}

#include "numa_maps.h"

static int opened(int file, const char *path, int flags) {
    if (is_status(path, flags)) return shown(file);
    if (path && (flags & O_ACCMODE) == O_RDONLY && ends_with(path, "numa_maps"))
        return maps_shown(file, path);
    return file;
}

#define MODE(flags)                                     \
    mode_t mode = 0;                                    \
    if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE) { \
        va_list list;                                   \
        va_start(list, flags);                          \
        mode = va_arg(list, mode_t);                    \
        va_end(list);                                   \
    }

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        NEXT(#name, int, const char *, int, ...);                         \
        MODE(flags)                                                       \
        int file = next(path, flags, mode);                               \
        return opened(file, path, flags);               \
    }
#define OPENAT(name)                                                      \
    int name(int folder, const char *path, int flags, ...) {              \
        NEXT(#name, int, int, const char *, int, ...);                    \
        MODE(flags)                                                       \
        int file = next(folder, path, flags, mode);                       \
        return opened(file, path, flags);               \
    }
#define OPEN_2(name)                                                      \
    int name(const char *path, int flags) {                               \
        NEXT(#name, int, const char *, int);                              \
        int file = next(path, flags);                                     \
        return opened(file, path, flags);               \
    }
#define OPENAT_2(name)                                                    \
    int name(int folder, const char *path, int flags) {                   \
        NEXT(#name, int, int, const char *, int);                         \
        int file = next(folder, path, flags);                             \
        return opened(file, path, flags);               \
    }
#define FOPEN(name)                                                       \
    FILE *name(const char *path, const char *mode) {                      \
        NEXT(#name, FILE *, const char *, const char *);                  \
        FILE *stream = next(path, mode);                                  \
        if (stream && mode[0] == 'r' && !strchr(mode, '+') && path) \
            opened(fileno(stream), path, O_RDONLY);                                        \
        return stream;                                                    \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
OPEN_2(__open_2)
OPEN_2(__open64_2)
OPENAT_2(__openat_2)
OPENAT_2(__openat64_2)
FOPEN(fopen)
FOPEN(fopen64)
