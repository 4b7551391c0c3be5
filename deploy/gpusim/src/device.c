/* Which devices there are, what they are called and where they sit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "sim.h"

API const char *nvmlErrorString(ret_t code) {
    switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case MEMORY: return "Insufficient Memory";
    case VERSION_MISMATCH: return "Argument Version Mismatch";
    default: return "Unknown Error";
    }
}

API ret_t nvmlSystemGetDriverVersion(char *version, unsigned size) {
    OPEN(call, NULL, SYSTEM);
    return copy_text(call.state->driver, version, size);
}

API ret_t nvmlSystemGetNVMLVersion(char *version, unsigned size) {
    OPEN(call, NULL, SYSTEM);
    return copy_text(call.state->nvml, version, size);
}

API ret_t nvmlSystemGetCudaDriverVersion(int *version) {
    OPEN(call, NULL, SYSTEM);
    if (version == NULL)
        return INVALID_ARGUMENT;
    *version = call.state->cuda;
    return OK;
}

API ret_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    OPEN(call, NULL, SYSTEM);
    if (version == NULL)
        return INVALID_ARGUMENT;
    *version = call.state->cuda;
    return OK;
}

API ret_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size) {
    OPEN(call, NULL, SYSTEM);
    if (name == NULL || size == 0)
        return INVALID_ARGUMENT;
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return NOT_FOUND;
    size_t length = fread(name, 1, size - 1, file);
    fclose(file);
    name[length] = '\0';
    return OK;
}

API ret_t nvmlDeviceGetCount_v2(unsigned *count) {
    OPEN(call, NULL, SYSTEM);
    if (count == NULL)
        return INVALID_ARGUMENT;
    *count = call.state->gpus;
    return OK;
}

API ret_t nvmlDeviceGetCount(unsigned *count) {
    return nvmlDeviceGetCount_v2(count);
}

static ret_t hand_out(const struct call *call, unsigned gpu, unsigned mig, handle_t *device) {
    struct call of_gpu = *call; /* the call names no GPU before it has a handle */
    of_gpu.index = gpu;
    of_gpu.gpu = call->state->gpu[gpu];
    ret_t code = fault_code(&of_gpu, "nvmlDeviceGetHandle");
    if (code != OK)
        return code;
    if (handle_check(call, gpu) != OK)
        return GPU_IS_LOST;
    *device = handle_of(call->state, gpu, mig);
    return OK;
}

API ret_t nvmlDeviceGetHandleByIndex_v2(unsigned index, handle_t *device) {
    OPEN(call, NULL, SYSTEM);
    if (device == NULL || index >= call.state->gpus)
        return INVALID_ARGUMENT;
    return hand_out(&call, index, 0, device);
}

API ret_t nvmlDeviceGetHandleByIndex(unsigned index, handle_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

API ret_t nvmlDeviceGetHandleByUUID(const char *uuid, handle_t *device) {
    OPEN(call, NULL, SYSTEM);
    if (uuid == NULL || device == NULL)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < call.state->gpus; i++) {
        const struct gpu *gpu = call.state->gpu[i];
        if (strcmp(gpu->k.text[T_uuid], uuid) == 0)
            return hand_out(&call, i, 0, device);
        for (unsigned m = 0; m < gpu->migs; m++)
            if (strcmp(gpu->mig[m]->text[T_uuid], uuid) == 0)
                return hand_out(&call, i, m + 1, device);
    }
    return NOT_FOUND;
}

API ret_t nvmlDeviceGetHandleBySerial(const char *serial, handle_t *device) {
    OPEN(call, NULL, SYSTEM);
    if (serial == NULL || device == NULL)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < call.state->gpus; i++)
        if (strcmp(call.state->gpu[i]->k.text[T_serial], serial) == 0)
            return hand_out(&call, i, 0, device);
    return NOT_FOUND;
}

struct address {
    unsigned domain, bus, device, function;
};

static bool address_of(const char *text, struct address *address) {
    return sscanf(text, "%x:%x:%x.%x", &address->domain, &address->bus, &address->device, &address->function) == 4;
}

API ret_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, handle_t *device) {
    OPEN(call, NULL, SYSTEM);
    struct address wanted, found;
    if (bus_id == NULL || device == NULL || !address_of(bus_id, &wanted))
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < call.state->gpus; i++)
        if (address_of(call.state->gpu[i]->k.text[T_bus_id], &found) &&
            memcmp(&wanted, &found, sizeof wanted) == 0)
            return hand_out(&call, i, 0, device);
    return NOT_FOUND;
}

API ret_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, handle_t *device) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

API ret_t nvmlDeviceGetIndex(handle_t device, unsigned *index) {
    OPEN(call, device, GPU_ONLY);
    if (index == NULL)
        return INVALID_ARGUMENT;
    *index = call.index;
    return OK;
}

API ret_t nvmlDeviceGetName(handle_t device, char *name, unsigned size) {
    OPEN(call, device, ANY_DEVICE);
    return copy_text(call.k->text[T_name], name, size);
}

API ret_t nvmlDeviceGetUUID(handle_t device, char *uuid, unsigned size) {
    OPEN(call, device, ANY_DEVICE);
    return copy_text(call.k->text[T_uuid], uuid, size);
}

API ret_t nvmlDeviceGetSerial(handle_t device, char *serial, unsigned size) {
    OPEN(call, device, GPU_ONLY);
    return copy_text(call.k->text[T_serial], serial, size);
}

API ret_t nvmlDeviceGetVbiosVersion(handle_t device, char *version, unsigned size) {
    OPEN(call, device, GPU_ONLY);
    return copy_text(call.k->text[T_vbios], version, size);
}

API ret_t nvmlDeviceGetBoardPartNumber(handle_t device, char *number, unsigned size) {
    OPEN(call, device, GPU_ONLY);
    return copy_text(call.k->text[T_part_number], number, size);
}

API ret_t nvmlDeviceGetMinorNumber(handle_t device, unsigned *minor) {
    OPEN(call, device, GPU_ONLY);
    return number_unsigned(&call, K_minor, 1, minor);
}

/* nvmlPciInfo_t since _v3 */
struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_id, pci_subsystem;
    char bus_id[32];
};

static ret_t pci_info(const struct call *call, struct pci_info *info) {
    struct address at;
    if (info == NULL)
        return INVALID_ARGUMENT;
    if (!address_of(call->k->text[T_bus_id], &at))
        return NOT_SUPPORTED;
    memset(info, 0, sizeof *info);
    info->domain = at.domain;
    info->bus = at.bus;
    info->device = at.device;
    info->pci_id = (unsigned)strtoul(call->k->text[T_pci_id], NULL, 16);
    info->pci_subsystem = (unsigned)strtoul(call->k->text[T_pci_subsystem], NULL, 16);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.%X", at.domain, at.bus & 0xFF, at.device & 0xFF,
             at.function & 0xF);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.%X", at.domain & 0xFFFF, at.bus & 0xFF,
             at.device & 0xFF, at.function & 0xF);
    return OK;
}

API ret_t nvmlDeviceGetPciInfo_v3(handle_t device, struct pci_info *info) {
    OPEN(call, device, GPU_ONLY);
    return pci_info(&call, info);
}

API ret_t nvmlDeviceGetPciInfo_v2(handle_t device, struct pci_info *info) {
    OPEN(call, device, GPU_ONLY);
    return pci_info(&call, info);
}

static ret_t affinity(const char *list, unsigned size, unsigned long *mask) {
    if (size == 0 || mask == NULL)
        return INVALID_ARGUMENT;
    if (list[0] == '\0')
        return NOT_SUPPORTED;
    cpu_mask(list, size, mask);
    return OK;
}

API ret_t nvmlDeviceGetCpuAffinity(handle_t device, unsigned size, unsigned long *mask) {
    OPEN(call, device, GPU_ONLY);
    return affinity(call.k->text[T_cpus], size, mask);
}

API ret_t nvmlDeviceGetCpuAffinityWithinScope(handle_t device, unsigned size, unsigned long *mask, unsigned scope) {
    OPEN(call, device, GPU_ONLY);
    return scope > 1 ? INVALID_ARGUMENT : affinity(call.k->text[T_cpus], size, mask);
}

API ret_t nvmlDeviceGetMemoryAffinity(handle_t device, unsigned size, unsigned long *mask, unsigned scope) {
    OPEN(call, device, GPU_ONLY);
    return scope > 1 ? INVALID_ARGUMENT : affinity(call.k->text[T_numa], size, mask);
}

API ret_t nvmlDeviceGetCudaComputeCapability(handle_t device, int *major, int *minor) {
    OPEN(call, device, ANY_DEVICE);
    if (major == NULL || minor == NULL)
        return INVALID_ARGUMENT;
    const struct values *k = &call.gpu->k;
    if (!k->given[K_cc_major] || !k->given[K_cc_minor])
        return NOT_SUPPORTED;
    *major = (int)curve_value(&k->number[K_cc_major], 0);
    *minor = (int)curve_value(&k->number[K_cc_minor], 0);
    return OK;
}

/* Numbers that are asked for by one argument each. */
#define UNSIGNED(function, key, scope) \
    API ret_t function(handle_t device, unsigned *value) { \
        OPEN(call, device, scope); \
        return number_unsigned(&call, key, 1, value); \
    }

UNSIGNED(nvmlDeviceGetArchitecture, K_arch, GPU_ONLY)
UNSIGNED(nvmlDeviceGetBrand, K_brand, GPU_ONLY)
UNSIGNED(nvmlDeviceGetNumGpuCores, K_cores, GPU_ONLY)
UNSIGNED(nvmlDeviceGetMemoryBusWidth, K_bus_width, GPU_ONLY)
UNSIGNED(nvmlDeviceGetBoardId, K_board_id, GPU_ONLY)
UNSIGNED(nvmlDeviceGetModuleId, K_module_id, GPU_ONLY)
UNSIGNED(nvmlDeviceGetPersistenceMode, K_persistence, GPU_ONLY)
UNSIGNED(nvmlDeviceGetComputeMode, K_compute_mode, ANY_DEVICE)
UNSIGNED(nvmlDeviceGetDisplayMode, K_display_mode, GPU_ONLY)
UNSIGNED(nvmlDeviceGetDisplayActive, K_display_active, GPU_ONLY)
UNSIGNED(nvmlDeviceGetPerformanceState, K_pstate, SENSOR)
UNSIGNED(nvmlDeviceGetPowerState, K_pstate, SENSOR)
UNSIGNED(nvmlDeviceGetFanSpeed, K_fan, SENSOR)
UNSIGNED(nvmlDeviceGetCurrPcieLinkGeneration, K_pcie_gen, SENSOR)
UNSIGNED(nvmlDeviceGetCurrPcieLinkWidth, K_pcie_width, SENSOR)
UNSIGNED(nvmlDeviceGetMaxPcieLinkGeneration, K_pcie_max_gen, SENSOR)
UNSIGNED(nvmlDeviceGetGpuMaxPcieLinkGeneration, K_pcie_max_gen, SENSOR)
UNSIGNED(nvmlDeviceGetMaxPcieLinkWidth, K_pcie_max_width, SENSOR)
UNSIGNED(nvmlDeviceGetPcieReplayCounter, K_pcie_replay, SENSOR)
