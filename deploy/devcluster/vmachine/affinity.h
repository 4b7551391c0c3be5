/* Calls for the CPUs of a thread. */

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
