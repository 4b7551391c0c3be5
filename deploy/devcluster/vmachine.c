/* Lets processes live on a machine that is not there: CPUs, NUMA domains and memory policies.
 *
 * Preloaded into a node's slurmd, jobs and commands, it answers the kernel's calls for CPU affinity
 * and memory policy out of records of its own, one small file for each thread in RECORDS, and shows
 * the recorded CPUs in /proc/PID/status. The real affinity of a process is never changed. Slurm's
 * task/affinity, libnuma, hwloc, taskset, Python and OpenMP see the machine that way, together with
 * the /sys that each node has mounted.
 *
 * A record's name has the thread's start time, so that a number given out again is not mistaken; new
 * processes and threads get a copy of their creator's. A thread without a record has what its
 * process has, else what its parent has, else the whole machine. Whatever goes wrong here, the real
 * call is made in its place: no program breaks for the lack of a record.
 *
 * Not seen by it: static binaries, programs that make system calls without libc's functions (Go),
 * those started without LD_PRELOAD (env -i, setuid), and what asks the processor itself (cpuid).
 *
 * Compiled by _virtual.py, for one machine and one folder of records, with -DVIRTUAL_CPUS=256
 * -DVIRTUAL_DOMAINS=8 -DRECORDS="...". The idea of recording wished masks in a preloaded library
 * comes from the team's slurmbox (vcpu_shim.c).
 */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE /* its inline open() and such would stand in the way of ours */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/vfs.h>
#include <unistd.h>

#define WORD_BITS 64
#define WORDS ((VIRTUAL_CPUS + WORD_BITS - 1) / WORD_BITS)
#define ALL_DOMAINS (VIRTUAL_DOMAINS < 64 ? (1ULL << VIRTUAL_DOMAINS) - 1 : ~0ULL)
#define PARENTS_MAX 64
#define STATUS_MAX 16384

enum { DEFAULT, PREFERRED, BIND, INTERLEAVE, LOCAL, PREFERRED_MANY, WEIGHTED_INTERLEAVE };
enum { MODE_FLAGS = 0xe000, GET_NODE = 1, GET_ADDRESS = 2, GET_ALLOWED = 4 };

typedef struct {
    uint64_t cpus[WORDS];
    int mode; /* of the memory policy, with its flags */
    uint64_t domains;
} record_t;

/* The next library's function of that name, found once. */
#define NEXT(name, result, ...)                                    \
    static result (*next)(__VA_ARGS__);                            \
    if (!next) next = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static long real(long number, long a, long b, long c, long d, long e, long f) {
    NEXT("syscall", long, long, ...);
    return next(number, a, b, c, d, e, f);
}
#define REAL(number, a, b, c) real(number, (long)(a), (long)(b), (long)(c), 0, 0, 0)

static pid_t own_tid(void) { return (pid_t)REAL(SYS_gettid, 0, 0, 0); }

static int fail(int error) {
    errno = error;
    return -1;
}

/* --- records: no memory is allocated and no lock taken, as all of it may run between fork and exec */

static ssize_t slurp(const char *path, char *text, size_t size) {
    int file = (int)REAL(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    size_t have = 0;
    while (have < size - 1) {
        ssize_t more = REAL(SYS_read, file, text + have, size - 1 - have);
        if (more <= 0) break;
        have += (size_t)more;
    }
    REAL(SYS_close, file, 0, 0);
    text[have] = 0;
    return (ssize_t)have;
}

/* Start time in clock ticks, and the parent; 0 where there is no such thread. */
static uint64_t start_of(pid_t tid, pid_t *parent) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)tid);
    if (slurp(path, text, sizeof text) <= 0) return 0;
    char *at = strrchr(text, ')'); /* the name before it may hold anything */
    if (!at) return 0;
    at += 2;
    for (int field = 3; *at; field++) {
        if (field == 4 && parent) *parent = (pid_t)strtol(at, NULL, 10);
        if (field == 22) return strtoull(at, NULL, 10);
        at = strchr(at, ' ');
        if (!at) return 0;
        at++;
    }
    return 0;
}

static pid_t leader_of(pid_t tid) {
    char path[64], text[2048];
    snprintf(path, sizeof path, "/proc/%d/status", (int)tid);
    if (slurp(path, text, sizeof text) <= 0) return 0;
    char *at = strstr(text, "\nTgid:");
    return at ? (pid_t)strtol(at + 6, NULL, 10) : 0;
}

static void whole(record_t *record) {
    memset(record, 0, sizeof *record);
    for (int cpu = 0; cpu < VIRTUAL_CPUS; cpu++)
        record->cpus[cpu / WORD_BITS] |= 1ULL << cpu % WORD_BITS;
}

static void name_of(char *path, size_t size, pid_t tid, uint64_t start) {
    snprintf(path, size, "%s/%d-%llu", RECORDS, (int)tid, (unsigned long long)start);
}

/* "MODE DOMAINS WORD WORD...", the numbers in hexadecimal. */
static int load(pid_t tid, uint64_t start, record_t *record) {
    char path[sizeof RECORDS + 64], text[64 + 20 * WORDS], *at = text;
    name_of(path, sizeof path, tid, start);
    if (slurp(path, text, sizeof text) <= 0) return 0;
    record->mode = (int)strtol(at, &at, 16);
    record->domains = strtoull(at, &at, 16);
    for (int word = 0; word < WORDS; word++) record->cpus[word] = strtoull(at, &at, 16);
    return 1;
}

/* The first record, that of the creator, must not undo what somebody has set by then. */
static int save(pid_t tid, uint64_t start, const record_t *record, int first) {
    char path[sizeof RECORDS + 64], draft[sizeof RECORDS + 64], text[64 + 20 * WORDS];
    size_t size = (size_t)snprintf(text, sizeof text, "%x %llx", (unsigned)record->mode,
                                   (unsigned long long)record->domains);
    for (int word = 0; word < WORDS; word++)
        size += (size_t)snprintf(text + size, sizeof text - size, " %llx",
                                 (unsigned long long)record->cpus[word]);
    text[size++] = '\n';
    name_of(path, sizeof path, tid, start);
    snprintf(draft, sizeof draft, "%s/.%d-%d", RECORDS, (int)tid, (int)own_tid());
    int file = (int)real(SYS_openat, AT_FDCWD, (long)draft, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC,
                         0644, 0, 0);
    if (file < 0) return 0;
    int whole_text = REAL(SYS_write, file, text, size) == (long)size;
    REAL(SYS_close, file, 0, 0);
    /* By rename: whoever looks sees the old record or the new one. */
    const long here = AT_FDCWD;
    if (whole_text && !first)
        return real(SYS_renameat, here, (long)draft, here, (long)path, 0, 0) == 0;
    int linked = whole_text && real(SYS_linkat, here, (long)draft, here, (long)path, 0, 0) == 0;
    real(SYS_unlinkat, here, (long)draft, 0, 0, 0, 0);
    return linked;
}

/* What a thread has; its start time is returned, 0 where there is no such thread. */
static uint64_t find(pid_t tid, record_t *record) {
    pid_t parent = 0;
    uint64_t start = start_of(tid, &parent), first = start;
    if (!start) return 0;
    for (int step = 0; step < PARENTS_MAX && start; step++) {
        if (load(tid, start, record)) return first;
        pid_t leader = leader_of(tid);
        if (leader && leader != tid)
            tid = leader;
        else if (parent > 1)
            tid = parent;
        else
            break;
        start = start_of(tid, &parent);
    }
    whole(record);
    return first;
}

static uint64_t find_own(record_t *record) {
    uint64_t start = find(own_tid(), record);
    if (!start) whole(record);
    return start;
}

/* --- CPU affinity ------------------------------------------------------------------------------ */

static int set_cpus(pid_t tid, size_t size, const void *mask) {
    record_t record;
    pid_t thread = tid ? tid : own_tid();
    uint64_t start = find(thread, &record), any = 0;
    if (!start) return fail(tid ? ESRCH : ENOSYS);
    if (tid && thread != own_tid()) { /* is it allowed? The kernel says, asked for no change */
        cpu_set_t now;
        if (REAL(SYS_sched_getaffinity, tid, sizeof now, &now) > 0 &&
            REAL(SYS_sched_setaffinity, tid, sizeof now, &now) < 0 && errno == EPERM)
            return -1;
    }
    for (int word = 0; word < WORDS; word++) {
        uint64_t wished = 0;
        for (int bit = 0; bit < WORD_BITS; bit++) {
            size_t cpu = (size_t)word * WORD_BITS + (size_t)bit;
            if (cpu < VIRTUAL_CPUS && cpu / 8 < size &&
                ((const unsigned char *)mask)[cpu / 8] >> cpu % 8 & 1)
                wished |= 1ULL << bit;
        }
        record.cpus[word] = wished;
        any |= wished;
    }
    if (!any) return fail(EINVAL);
    return save(thread, start, &record, 0) ? 0 : fail(EIO);
}

/* As the kernel has it: the bytes written, and EINVAL for a mask that is too small or odd. */
static int get_cpus(pid_t tid, size_t size, void *mask) {
    record_t record;
    if (size < WORDS * sizeof(uint64_t) || size % sizeof(long)) return fail(EINVAL);
    if (!find(tid ? tid : own_tid(), &record)) return fail(ESRCH);
    memcpy(mask, record.cpus, sizeof record.cpus); /* little-endian, as x86-64 and ARM are */
    return sizeof record.cpus;
}

int sched_setaffinity(pid_t tid, size_t size, const cpu_set_t *mask) {
    return set_cpus(tid, size, mask);
}

int sched_getaffinity(pid_t tid, size_t size, cpu_set_t *mask) {
    int written = get_cpus(tid, size, mask);
    if (written < 0) return -1;
    memset((char *)mask + written, 0, size - (size_t)written);
    return 0;
}

/* The number of any thread: libc has no call for it, so where it keeps it is found in our own. */
static pid_t tid_of(pthread_t thread) {
    static size_t place;
    if (pthread_equal(thread, pthread_self())) return own_tid();
    if (!place)
        for (size_t offset = 0x200; offset < 0x400 && !place; offset += sizeof(pid_t))
            if (*(pid_t *)((char *)pthread_self() + offset) == own_tid()) place = offset;
    return place ? *(pid_t *)((char *)thread + place) : 0;
}

int pthread_setaffinity_np(pthread_t thread, size_t size, const cpu_set_t *mask) {
    pid_t tid = tid_of(thread);
    return tid <= 0 ? ESRCH : set_cpus(tid, size, mask) < 0 ? errno : 0;
}

int pthread_getaffinity_np(pthread_t thread, size_t size, cpu_set_t *mask) {
    pid_t tid = tid_of(thread);
    return tid <= 0 ? ESRCH : sched_getaffinity(tid, size, mask) < 0 ? errno : 0;
}

/* Some CPU out of those allowed: which one is decided by the real one. */
static int some_cpu(void) {
    record_t record;
    unsigned cpu = 0;
    REAL(SYS_getcpu, &cpu, NULL, NULL);
    find_own(&record);
    int allowed[VIRTUAL_CPUS], count = 0;
    for (int one = 0; one < VIRTUAL_CPUS; one++)
        if (record.cpus[one / WORD_BITS] >> one % WORD_BITS & 1) allowed[count++] = one;
    return count ? allowed[cpu % (unsigned)count] : 0;
}

int sched_getcpu(void) { return some_cpu(); }

/* --- memory policy ----------------------------------------------------------------------------- */

static uint64_t domains_in(const unsigned long *mask, unsigned long bits) {
    if (!mask || bits <= 1) return 0;
    bits--; /* the kernel counts so */
    return bits < 64 ? mask[0] & ((1UL << bits) - 1) : mask[0];
}

static int beyond(const unsigned long *mask, unsigned long bits) {
    if (!mask || bits <= 65) return 0;
    for (unsigned long word = 1; word * 64 < bits - 1; word++)
        if (mask[word]) return 1;
    return 0;
}

/* The errors are those that Linux 6.18 was seen to give. */
static int policy_of(int mode, const unsigned long *mask, unsigned long bits, record_t *record) {
    uint64_t asked = domains_in(mask, bits), there = asked & ALL_DOMAINS;
    int plain = mode & ~MODE_FLAGS;
    if (plain < DEFAULT || plain > WEIGHTED_INTERLEAVE) return fail(EINVAL);
    if (plain == DEFAULT || plain == LOCAL) {
        if (asked || beyond(mask, bits)) return fail(EINVAL);
    } else if (!asked && plain == PREFERRED) {
        mode = LOCAL;
    } else if (!there) {
        return fail(EINVAL);
    }
    if (plain == PREFERRED) there &= -there; /* one domain alone */
    record->mode = mode;
    record->domains = there;
    return 0;
}

static int set_policy(int mode, const unsigned long *mask, unsigned long bits) {
    record_t record;
    uint64_t start = find_own(&record);
    if (policy_of(mode, mask, bits, &record) < 0) return -1;
    return start && save(own_tid(), start, &record, 0) ? 0 : fail(ENOMEM);
}

static int get_policy(int *mode, unsigned long *mask, unsigned long bits, long flags) {
    record_t record;
    if (mask && bits < VIRTUAL_DOMAINS) return fail(EINVAL);
    find_own(&record);
    if (mode) *mode = flags & GET_ALLOWED ? 0 : record.mode;
    if (mask) {
        memset(mask, 0, (bits + 62) / 64 * sizeof *mask);
        mask[0] = flags & GET_ALLOWED ? ALL_DOMAINS : record.domains;
    }
    return 0;
}

/* --- the calls made by number: libnuma, OpenMP of Intel, Python's ctypes --------------------------- */

long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
    long d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    switch (number) {
    case SYS_sched_setaffinity:
        return set_cpus((pid_t)a, (size_t)b, (const void *)c);
    case SYS_sched_getaffinity:
        return get_cpus((pid_t)a, (size_t)b, (void *)c);
    case SYS_getcpu:
        if (a) *(unsigned *)a = (unsigned)some_cpu();
        return b ? real(number, 0, b, 0, 0, 0, 0) : 0;
    case SYS_set_mempolicy:
        return set_policy((int)a, (const unsigned long *)b, (unsigned long)c);
    case SYS_get_mempolicy:
        if (e & (GET_NODE | GET_ADDRESS)) break; /* where memory really is */
        return get_policy((int *)a, (unsigned long *)b, (unsigned long)c, e);
    case SYS_mbind: { /* checked, and otherwise without effect */
        record_t record;
        return policy_of((int)c, (const unsigned long *)d, (unsigned long)e, &record);
    }
    }
    return real(number, a, b, c, d, e, f);
}

/* --- /proc/PID/status ---------------------------------------------------------------------------- */

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
    int flags = fcntl(file, F_GETFD);
    int other = memfd_create("status", flags & FD_CLOEXEC ? MFD_CLOEXEC : 0);
    if (other < 0) goto keep;
    if (write(other, copy, used) != (ssize_t)used || lseek(other, 0, SEEK_SET) != 0) {
        close(other);
        goto keep;
    }
    /* The same number: the caller may count on getting the lowest one. */
    if (dup3(other, file, flags & FD_CLOEXEC ? O_CLOEXEC : 0) < 0) {
        close(other);
        goto keep;
    }
    close(other);
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
        return is_status(path, flags) ? shown(file) : file;               \
    }
#define OPENAT(name)                                                      \
    int name(int folder, const char *path, int flags, ...) {              \
        NEXT(#name, int, int, const char *, int, ...);                    \
        MODE(flags)                                                       \
        int file = next(folder, path, flags, mode);                       \
        return is_status(path, flags) ? shown(file) : file;               \
    }
#define OPEN_2(name)                                                      \
    int name(const char *path, int flags) {                               \
        NEXT(#name, int, const char *, int);                              \
        int file = next(path, flags);                                     \
        return is_status(path, flags) ? shown(file) : file;               \
    }
#define OPENAT_2(name)                                                    \
    int name(int folder, const char *path, int flags) {                   \
        NEXT(#name, int, int, const char *, int);                         \
        int file = next(folder, path, flags);                             \
        return is_status(path, flags) ? shown(file) : file;               \
    }
#define FOPEN(name)                                                       \
    FILE *name(const char *path, const char *mode) {                      \
        NEXT(#name, FILE *, const char *, const char *);                  \
        FILE *stream = next(path, mode);                                  \
        if (stream && mode[0] == 'r' && !strchr(mode, '+') && is_status(path, O_RDONLY)) \
            shown(fileno(stream));                                        \
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

/* --- inheritance ----------------------------------------------------------------------------------- */

/* This thread's number. A child of vfork, which has all of its creator's memory, sees the creator's. */
static __thread pid_t mine;

static void adopt(pid_t tid, const record_t *record) {
    uint64_t start = start_of(tid, NULL);
    if (start) save(tid, start, record, 1);
}

typedef struct {
    void *(*body)(void *);
    void *argument;
    record_t record;
} beginning_t;

static void *begin(void *given) {
    beginning_t beginning = *(beginning_t *)given;
    free(given);
    mine = own_tid();
    adopt(mine, &beginning.record);
    return beginning.body(beginning.argument);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *),
                   void *argument) {
    NEXT("pthread_create", int, pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    beginning_t *beginning = malloc(sizeof *beginning);
    if (!beginning) return next(thread, attributes, body, argument);
    beginning->body = body;
    beginning->argument = argument;
    find_own(&beginning->record);
    /* CPUs among the attributes would go to the kernel, which does not have them. */
    cpu_set_t wished;
    pthread_attr_t *own = (pthread_attr_t *)attributes;
    int wishes = own && pthread_attr_getaffinity_np(own, sizeof wished, &wished) == 0 &&
                 CPU_COUNT(&wished) < CPU_SETSIZE; /* all of them: none are given */
    if (wishes) {
        uint64_t any = 0;
        for (int word = 0; word < WORDS; word++)
            any |= beginning->record.cpus[word] = ((uint64_t *)&wished)[word];
        if (!any) whole(&beginning->record);
        pthread_attr_setaffinity_np(own, 0, &wished); /* a size of 0 takes them away */
    }
    int error = next(thread, attributes, begin, beginning);
    if (wishes) pthread_attr_setaffinity_np(own, sizeof wished, &wished);
    if (error) free(beginning);
    return error;
}

static __thread record_t forking;

static void before_fork(void) { find_own(&forking); }

static void after_fork(void) {
    mine = own_tid();
    adopt(mine, &forking);
}

/* The child writes its record, too, but the parent may be back and changed before that. */
pid_t fork(void) {
    NEXT("fork", pid_t, void);
    pid_t child = next();
    int error = errno;
    if (child > 0) adopt(child, &forking); /* as before_fork has left it */
    errno = error;
    return child;
}

/* In a child of vfork the last chance to know what the creator had: from then on they go apart. */
static void before_exec(void) {
    int error = errno;
    record_t record;
    pid_t tid = own_tid();
    uint64_t start = mine && mine != tid ? start_of(tid, NULL) : 0;
    if (start && !load(tid, start, &record) && find(mine, &record)) save(tid, start, &record, 1);
    errno = error;
}

int execve(const char *path, char *const arguments[], char *const environment[]) {
    NEXT("execve", int, const char *, char *const *, char *const *);
    before_exec();
    return next(path, arguments, environment);
}

int execv(const char *path, char *const arguments[]) {
    NEXT("execv", int, const char *, char *const *);
    before_exec();
    return next(path, arguments);
}

int execvp(const char *file, char *const arguments[]) {
    NEXT("execvp", int, const char *, char *const *);
    before_exec();
    return next(file, arguments);
}

int execvpe(const char *file, char *const arguments[], char *const environment[]) {
    NEXT("execvpe", int, const char *, char *const *, char *const *);
    before_exec();
    return next(file, arguments, environment);
}

#define SPAWN(name)                                                                              \
    int name(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,            \
             const posix_spawnattr_t *attributes, char *const arguments[],                       \
             char *const environment[]) {                                                        \
        NEXT(#name, int, pid_t *, const char *, const posix_spawn_file_actions_t *,              \
             const posix_spawnattr_t *, char *const *, char *const *);                           \
        pid_t child = 0;                                                                         \
        int error = next(&child, path, actions, attributes, arguments, environment);             \
        record_t record;                                                                         \
        if (!error && find_own(&record)) adopt(child, &record);                                  \
        if (!error && pid) *pid = child;                                                         \
        return error;                                                                            \
    }
SPAWN(posix_spawn)
SPAWN(posix_spawnp)

/* A program has a record from its fork on; where nothing here saw that, it gets its parent's. */
__attribute__((constructor)) static void started(void) {
    int error = errno;
    record_t record;
    pid_t tid = mine = own_tid();
    uint64_t start = start_of(tid, NULL);
    if (start && !load(tid, start, &record) && find(tid, &record)) save(tid, start, &record, 1);
    pthread_atfork(before_fork, NULL, after_fork);
    errno = error;
}
