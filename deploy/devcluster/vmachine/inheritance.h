/* New threads, processes and programs have what their creator had. */

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
