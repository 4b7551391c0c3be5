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
 * process has, else what its parent has, else the whole machine: nothing breaks for the lack of one.
 * Setting CPUs fails where no record can be written.
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
#include "records.h"
#include "affinity.h"
#include "policy.h"
#include "status.h"
#include "inheritance.h"

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
