/* What a state file says about a device, at the time of a call. */
#include <signal.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

bool number(const struct call *call, enum key key, double *value) {
    if (!call->k->given[key])
        return false;
    *value = curve_value(&call->k->number[key], call->t);
    return true;
}

double number_or(const struct call *call, enum key key, double otherwise) {
    double value;
    return number(call, key, &value) ? value : otherwise;
}

ret_t number_unsigned(const struct call *call, enum key key, double scale, unsigned *value) {
    double found;
    if (value == NULL)
        return INVALID_ARGUMENT;
    if (!number(call, key, &found))
        return NOT_SUPPORTED;
    *value = (unsigned)(found * scale + 0.5);
    return OK;
}

bool total(const struct call *call, enum key rate, double *value) {
    enum key base = rate + 1; /* keys.h puts NAME_base right behind NAME */
    if (!call->k->given[rate])
        return false;
    *value = number_or(call, base, 0) + curve_integral(&call->k->number[rate], call->t);
    return true;
}

bool mean(const struct call *call, enum key rate, double seconds, double *value) {
    if (!call->k->given[rate])
        return false;
    const struct curve *curve = &call->k->number[rate];
    double from = call->t > seconds ? call->t - seconds : 0;
    if (call->t - from < 1e-6)
        *value = curve_value(curve, call->t);
    else
        *value = (curve_integral(curve, call->t) - curve_integral(curve, from)) / (call->t - from);
    return true;
}

ret_t copy_text(const char *text, char *buffer, unsigned size) {
    if (buffer == NULL)
        return INVALID_ARGUMENT;
    if (text[0] == '\0')
        return NOT_SUPPORTED;
    size_t length = strlen(text);
    if (length >= size)
        return INSUFFICIENT_SIZE;
    memcpy(buffer, text, length + 1);
    return OK;
}

void cpu_mask(const char *list, unsigned size, unsigned long *mask) {
    const unsigned bits = 8 * sizeof *mask;
    memset(mask, 0, size * sizeof *mask);
    while (*list != '\0') {
        char *end;
        unsigned long first = strtoul(list, &end, 10), last = first;
        if (end == list)
            return;
        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        for (unsigned long cpu = first; cpu <= last && cpu < (unsigned long)size * bits; cpu++)
            mask[cpu / bits] |= 1UL << (cpu % bits);
        if (*end != ',')
            return;
        list = end + 1;
    }
}

/* The driver forgets a process at its end, so that a killed one vanishes without a new state file. */
bool process_listed(const struct process *process) {
    return process->ghost || kill((pid_t)process->pid, 0) == 0 || errno == EPERM;
}

/* mem_used where it is given; else what the device itself takes and what its processes hold. */
double memory_used(const struct call *call) {
    double used;
    if (number(call, K_mem_used, &used))
        return used;
    used = number_or(call, K_mem_base, 0);
    for (unsigned i = 0; i < call->gpu->process_count; i++) {
        const struct process *process = &call->gpu->processes[i];
        bool here = call->mig == NULL || (process->gi == (unsigned)number_or(call, K_gi, -1) &&
                                          process->ci == (unsigned)number_or(call, K_ci, -1));
        if (here && process_listed(process))
            used += curve_value(&process->memory, call->t);
    }
    return used;
}
