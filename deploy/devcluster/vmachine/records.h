/* The records: what each thread has. No memory is allocated here and no lock taken, as all of it
 * may run between fork and exec. */
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
