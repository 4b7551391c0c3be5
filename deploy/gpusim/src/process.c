/* Processes on a device, their memory and their shares. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>

#include "sim.h"

struct process_v1 {
    unsigned pid;
    u64 memory;
};

struct process_v2 { /* _v3 has the same layout */
    unsigned pid;
    u64 memory;
    unsigned gi, ci;
};

/* The next process of a type ('\0': any) on the call's device, or NULL. The driver forgets a process at its end, so
   that a killed one vanishes without a new state file. */
static const struct process *next_process(const struct call *call, char type, const struct process *process) {
    const struct process *end = call->gpu->processes + call->gpu->process_count;
    process = process == NULL ? call->gpu->processes : process + 1;
    for (; process < end; process++) {
        bool here = !call->is_mig || (process->gi == (unsigned)number_or(call, "gi", -1) &&
                                      process->ci == (unsigned)number_or(call, "ci", -1));
        if (here && (type == '\0' || process->type == type) &&
            (process->ghost || kill((pid_t)process->pid, 0) == 0 || errno == EPERM))
            return process;
    }
    return NULL;
}
#define EACH(process, call, type) \
    const struct process *process = next_process(call, type, NULL); process != NULL; \
    process = next_process(call, type, process)

double processes_memory(const struct call *call) {
    double sum = 0;
    for (EACH(process, call, '\0'))
        sum += curve_value(&process->memory, call->t);
    return sum;
}

/* Without a buffer, or with one that is too small, NVML says how many there are. */
static ret_t running(const struct call *call, char type, unsigned version, unsigned *count, void *infos) {
    unsigned room = infos == NULL ? 0 : *count, all = 0;
    for (EACH(process, call, type)) {
        u64 memory = (u64)curve_value(&process->memory, call->t);
        if (all < room && version == 1)
            ((struct process_v1 *)infos)[all] = (struct process_v1){process->pid, memory};
        else if (all < room)
            ((struct process_v2 *)infos)[all] = (struct process_v2){process->pid, memory, process->gi, process->ci};
        all++;
    }
    *count = all;
    return all > room ? INSUFFICIENT_SIZE : OK;
}

#define RUNNING(function, type) \
    API ret_t function(handle_t device, unsigned *count, void *infos) { \
        OPEN(call, device, ANY_DEVICE); \
        return running(&call, type, 1, count, infos); \
    } \
    API ret_t function##_v3(handle_t device, unsigned *count, void *infos) { \
        OPEN(call, device, ANY_DEVICE); \
        return running(&call, type, 3, count, infos); \
    } \
    ALIAS(function##_v2, function##_v3) /* the layout is the same */
RUNNING(nvmlDeviceGetComputeRunningProcesses, 'C')
RUNNING(nvmlDeviceGetGraphicsRunningProcesses, 'G')
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses, 'M')

struct share {
    unsigned pid;
    u64 microseconds;
    unsigned sm, mem, enc, dec;
};

/* One sample of each process that used the GPU, taken six times a second; none newer: NOT_FOUND. */
API ret_t nvmlDeviceGetProcessUtilization(handle_t device, struct share *shares, unsigned *count, u64 since) {
    OPEN(call, device, SENSOR);
    if (number_or(&call, "mig_mode", 0) >= 1)
        return NOT_SUPPORTED;
    u64 newest = (u64)(call.now * 6) * 1000000 / 6;
    double t = (double)newest / 1e6 - call.state->epoch;
    unsigned room = shares == NULL ? 0 : *count, all = 0;
    t = t < 0 ? 0 : t;
    for (EACH(process, &call, '\0')) {
#define PERCENT(curve) (unsigned)(curve_value(&process->curve, t) + 0.5)
        struct share share = {process->pid, newest, PERCENT(sm), PERCENT(mem), 0, 0};
        if (newest <= since || share.sm + share.mem == 0)
            continue;
        if (all < room)
            shares[all] = share;
        all++;
    }
    *count = all;
    return all == 0 ? NOT_FOUND : all > room ? INSUFFICIENT_SIZE : OK;
}
