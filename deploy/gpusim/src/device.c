/* Which devices there are, what they are called, where they sit, and how they are divided (MIG). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

API const char *nvmlErrorString(ret_t code) {
    return code == OK ? "Success" : "Error of the simulated driver";
}

API ret_t nvmlSystemGetDriverVersion(char *version, unsigned size) {
    OPEN(call, NULL, SYSTEM);
    return copy_text(call.state->driver, version, size);
}

API ret_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    OPEN(call, NULL, SYSTEM);
    *version = (int)call.state->cuda;
    return OK;
}
ALIAS(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2)

API ret_t nvmlDeviceGetCount_v2(unsigned *count) {
    OPEN(call, NULL, SYSTEM);
    *count = call.state->gpus;
    return OK;
}
ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2)

static ret_t hand_out(const struct call *call, unsigned gpu, unsigned mig, handle_t *handle) {
    ret_t code = fault_code(call, "nvmlDeviceGetHandle", (int)gpu);
    if (code != OK)
        return code;
    *handle = handle_of(call->state, gpu, mig);
    return is_lost(call, gpu) ? GPU_IS_LOST : OK;
}

API ret_t nvmlDeviceGetHandleByIndex_v2(unsigned index, handle_t *handle) {
    OPEN(call, NULL, SYSTEM);
    return index >= call.state->gpus ? INVALID_ARGUMENT : hand_out(&call, index, 0, handle);
}
ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2)

API ret_t nvmlDeviceGetHandleByUUID(const char *uuid, handle_t *handle) {
    OPEN(call, NULL, SYSTEM);
    for (unsigned i = 0; i < call.state->gpus; i++) {
        const struct gpu *gpu = call.state->gpu[i];
        if (strcmp(text_of(&gpu->self, "uuid"), uuid) == 0)
            return hand_out(&call, i, 0, handle);
        for (unsigned m = 0; m < gpu->migs; m++)
            if (strcmp(text_of(&gpu->mig[m], "uuid"), uuid) == 0)
                return hand_out(&call, i, m + 1, handle);
    }
    return NOT_FOUND;
}

API ret_t nvmlDeviceGetIndex(handle_t device, unsigned *index) {
    OPEN(call, device, GPU_ONLY);
    *index = call.index;
    return OK;
}

#define TEXT(function, key, scope) \
    API ret_t function(handle_t device, char *buffer, unsigned size) { \
        OPEN(call, device, scope); \
        return copy_text(text_of(call.device, key), buffer, size); \
    }
TEXT(nvmlDeviceGetName, "name", ANY_DEVICE)
TEXT(nvmlDeviceGetUUID, "uuid", ANY_DEVICE)
TEXT(nvmlDeviceGetSerial, "serial", GPU_ONLY)

struct pci_info { /* nvmlPciInfo_t since _v3 */
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_id, pci_subsystem;
    char bus_id[32];
};

API ret_t nvmlDeviceGetPciInfo_v3(handle_t device, struct pci_info *info) {
    OPEN(call, device, GPU_ONLY);
    unsigned domain, bus, slot, function;
    if (sscanf(text_of(call.device, "bus_id"), "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
        return NOT_SUPPORTED;
    *info = (struct pci_info){
        .domain = domain,
        .bus = bus,
        .device = slot,
        .pci_id = (unsigned)strtoul(text_of(call.device, "pci_id"), NULL, 16),
        .pci_subsystem = (unsigned)strtoul(text_of(call.device, "pci_subsystem"), NULL, 16),
    };
    const char *form = "%0*X:%02X:%02X.%X";
    snprintf(info->bus_id, sizeof info->bus_id, form, 8, domain, bus, slot, function);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, form, 4, domain, bus, slot, function);
    return OK;
}
ALIAS(nvmlDeviceGetPciInfo_v2, nvmlDeviceGetPciInfo_v3)

API ret_t nvmlDeviceGetCudaComputeCapability(handle_t device, unsigned *major, unsigned *minor) {
    OPEN(call, device, ANY_DEVICE);
    call.device = &call.gpu->self;
    ret_t code = number_unsigned(&call, "cc_major", 1, major);
    return code != OK ? code : number_unsigned(&call, "cc_minor", 1, minor);
}

API ret_t nvmlDeviceGetMigMode(handle_t device, unsigned *current, unsigned *pending) {
    OPEN(call, device, GPU_ONLY);
    ret_t code = number_unsigned(&call, "mig_mode", 1, current);
    *pending = *current;
    return code;
}

API ret_t nvmlDeviceIsMigDeviceHandle(handle_t device, unsigned *yes) {
    OPEN(call, device, ANY_DEVICE);
    *yes = call.is_mig;
    return OK;
}

API ret_t nvmlDeviceGetMaxMigDeviceCount(handle_t device, unsigned *count) {
    OPEN(call, device, GPU_ONLY);
    *count = (unsigned)number_or(&call, "mig_max", 0); /* 0 where the GPU cannot be divided */
    return OK;
}

API ret_t nvmlDeviceGetMigDeviceHandleByIndex(handle_t device, unsigned index, handle_t *mig) {
    OPEN(call, device, GPU_ONLY);
    if (index >= number_or(&call, "mig_max", 0))
        return find(call.device, "mig_max") != NULL ? INVALID_ARGUMENT : NOT_SUPPORTED;
    if (number_or(&call, "mig_mode", 0) < 1 || index >= call.gpu->migs)
        return NOT_FOUND;
    *mig = handle_of(call.state, call.index, index + 1);
    return OK;
}

API ret_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle_t mig, handle_t *device) {
    OPEN(call, mig, ANY_DEVICE);
    *device = handle_of(call.state, call.index, 0);
    return call.is_mig ? OK : INVALID_ARGUMENT;
}
