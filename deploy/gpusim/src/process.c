/* Processes on a device, their memory and their shares. */
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

struct process_detail {
    unsigned pid;
    u64 memory;
    unsigned gi, ci;
    u64 protected_memory;
};

static bool on_device(const struct call *call, const struct process *process) {
    if (call->mig != NULL && (process->gi != (unsigned)number_or(call, K_gi, -1) ||
                              process->ci != (unsigned)number_or(call, K_ci, -1)))
        return false;
    return process_listed(process);
}

static unsigned processes_of(const struct call *call, char type, const struct process **found) {
    unsigned count = 0;
    for (unsigned i = 0; i < call->gpu->process_count; i++) {
        const struct process *process = &call->gpu->processes[i];
        if ((type == '\0' || process->type == type) && on_device(call, process))
            found[count++] = process;
    }
    return count;
}

static const struct process **room(const struct call *call) {
    const struct process **found = calloc(call->gpu->process_count + 1, sizeof *found);
    if (found == NULL)
        abort();
    return found;
}

/* Without a buffer, or with one that is too small, NVML says how many there are. */
static ret_t running(const struct call *call, char type, unsigned version, unsigned *count, void *infos) {
    if (count == NULL)
        return INVALID_ARGUMENT;
    const struct process **found = room(call);
    unsigned most = *count, all = processes_of(call, type, found);
    *count = all;
    if (all > 0 && (infos == NULL || most < all)) {
        free(found);
        return INSUFFICIENT_SIZE;
    }
    for (unsigned i = 0; i < all; i++) {
        u64 memory = (u64)curve_value(&found[i]->memory, call->t);
        if (version == 1)
            ((struct process_v1 *)infos)[i] = (struct process_v1){found[i]->pid, memory};
        else
            ((struct process_v2 *)infos)[i] = (struct process_v2){found[i]->pid, memory, found[i]->gi, found[i]->ci};
    }
    free(found);
    return OK;
}

#define RUNNING(function, type, version) \
    API ret_t function(handle_t device, unsigned *count, void *infos) { \
        OPEN(call, device, ANY_DEVICE); \
        return running(&call, type, version, count, infos); \
    }

RUNNING(nvmlDeviceGetComputeRunningProcesses, 'C', 1)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v2, 'C', 2)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, 'C', 3)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses, 'G', 1)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v2, 'G', 2)
RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v3, 'G', 3)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses, 'M', 1)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v2, 'M', 2)
RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v3, 'M', 3)

struct detail_list {
    unsigned version, mode, count;
    struct process_detail *details;
};

API ret_t nvmlDeviceGetRunningProcessDetailList(handle_t device, struct detail_list *list) {
    OPEN(call, device, ANY_DEVICE);
    if (list == NULL || list->mode > 3)
        return INVALID_ARGUMENT;
    if (list->version != (sizeof *list | 1 << 24))
        return VERSION_MISMATCH;
    const struct process **found = room(&call);
    unsigned most = list->count, all = processes_of(&call, "CGM"[list->mode] /* 3, all types, is the text's end */, found);
    list->count = all;
    ret_t code = all > 0 && (list->details == NULL || most < all) ? INSUFFICIENT_SIZE : OK;
    for (unsigned i = 0; code == OK && i < all; i++)
        list->details[i] = (struct process_detail){
            .pid = found[i]->pid,
            .memory = (u64)curve_value(&found[i]->memory, call.t),
            .gi = found[i]->gi,
            .ci = found[i]->ci,
        };
    free(found);
    return code;
}

struct share {
    unsigned pid;
    u64 microseconds;
    unsigned sm, mem, enc, dec;
};

struct share_v2 {
    u64 microseconds;
    unsigned pid, sm, mem, enc, dec, jpg, ofa;
};

static unsigned percent(const struct curve *curve, double t) {
    return (unsigned)(curve_value(curve, t) + 0.5);
}

/* One sample of each process that used the GPU, taken six times a second; none newer: NOT_FOUND. */
static ret_t shares(const struct call *call, u64 since, struct share *into, unsigned most, unsigned *count) {
    u64 newest = (u64)(call->now * 6) * 1000000 / 6;
    double t = (double)newest / 1e6 - call->state->epoch;
    if (number_or(call, K_mig_mode, 0) >= 1)
        return NOT_SUPPORTED;
    const struct process **found = room(call);
    unsigned all = newest > since ? processes_of(call, '\0', found) : 0, used = 0;
    if (t < 0)
        t = 0;
    for (unsigned i = 0; i < all; i++) {
        const struct process *process = found[i];
        struct share share = {process->pid, newest, percent(&process->sm, t), percent(&process->mem, t),
                              percent(&process->enc, t), percent(&process->dec, t)};
        if (share.sm + share.mem + share.enc + share.dec == 0)
            continue;
        if (into != NULL && used < most)
            into[used] = share;
        used++;
    }
    free(found);
    *count = used;
    if (used == 0)
        return NOT_FOUND;
    return into == NULL || used > most ? INSUFFICIENT_SIZE : OK;
}

API ret_t nvmlDeviceGetProcessUtilization(handle_t device, struct share *into, unsigned *count, u64 since) {
    OPEN(call, device, SENSOR);
    return count == NULL ? INVALID_ARGUMENT : shares(&call, since, into, *count, count);
}

struct share_list {
    unsigned version, count;
    u64 since;
    struct share_v2 *shares;
};

API ret_t nvmlDeviceGetProcessesUtilizationInfo(handle_t device, struct share_list *list) {
    OPEN(call, device, SENSOR);
    if (list == NULL)
        return INVALID_ARGUMENT;
    if (list->version != (sizeof *list | 1 << 24))
        return VERSION_MISMATCH;
    unsigned most = list->shares == NULL ? 0 : list->count;
    struct share *into = calloc(most + 1, sizeof *into);
    if (into == NULL)
        abort();
    ret_t code = shares(&call, list->since, list->shares == NULL ? NULL : into, most, &list->count);
    for (unsigned i = 0; code == OK && i < list->count; i++)
        list->shares[i] = (struct share_v2){into[i].microseconds, into[i].pid, into[i].sm, into[i].mem,
                                            into[i].enc, into[i].dec, 0, 0};
    free(into);
    return code;
}
