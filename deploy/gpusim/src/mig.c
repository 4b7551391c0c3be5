/* MIG: the mode, the devices, their instances and sizes. */
#include <string.h>

#include "sim.h"

API ret_t nvmlDeviceGetMigMode(handle_t device, unsigned *current, unsigned *pending) {
    OPEN(call, device, GPU_ONLY);
    ret_t code = number_unsigned(&call, K_mig_mode, 1, current);
    if (code == OK && pending != NULL)
        *pending = (unsigned)number_or(&call, K_mig_pending, *current);
    return pending == NULL ? INVALID_ARGUMENT : code;
}

API ret_t nvmlDeviceIsMigDeviceHandle(handle_t device, unsigned *yes) {
    OPEN(call, device, ANY_DEVICE);
    if (yes == NULL)
        return INVALID_ARGUMENT;
    *yes = call.mig != NULL;
    return OK;
}

API ret_t nvmlDeviceGetMaxMigDeviceCount(handle_t device, unsigned *count) {
    OPEN(call, device, GPU_ONLY);
    if (count == NULL)
        return INVALID_ARGUMENT;
    *count = (unsigned)number_or(&call, K_mig_max, 0); /* 0 where the GPU cannot be divided */
    return OK;
}

API ret_t nvmlDeviceGetMigDeviceHandleByIndex(handle_t device, unsigned index, handle_t *mig) {
    OPEN(call, device, GPU_ONLY);
    if (mig == NULL || index >= number_or(&call, K_mig_max, 0))
        return call.k->given[K_mig_max] ? INVALID_ARGUMENT : NOT_SUPPORTED;
    if (number_or(&call, K_mig_mode, 0) < 1 || index >= call.gpu->migs)
        return NOT_FOUND;
    *mig = handle_of(call.state, call.index, index + 1);
    return OK;
}

API ret_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle_t mig, handle_t *device) {
    OPEN(call, mig, ANY_DEVICE);
    if (device == NULL || call.mig == NULL)
        return INVALID_ARGUMENT;
    *device = handle_of(call.state, call.index, 0);
    return OK;
}

static ret_t of_mig(const struct call *call, enum key key, unsigned *value) {
    return call->mig == NULL ? NOT_SUPPORTED : number_unsigned(call, key, 1, value);
}

API ret_t nvmlDeviceGetGpuInstanceId(handle_t device, unsigned *id) {
    OPEN(call, device, ANY_DEVICE);
    return of_mig(&call, K_gi, id);
}

API ret_t nvmlDeviceGetComputeInstanceId(handle_t device, unsigned *id) {
    OPEN(call, device, ANY_DEVICE);
    return of_mig(&call, K_ci, id);
}

struct attributes { /* nvmlDeviceAttributes_t */
    unsigned multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    u64 mebibytes;
};

API ret_t nvmlDeviceGetAttributes_v2(handle_t device, struct attributes *attributes) {
    OPEN(call, device, ANY_DEVICE);
    if (attributes == NULL)
        return INVALID_ARGUMENT;
    if (call.mig == NULL)
        return NOT_SUPPORTED;
    memset(attributes, 0, sizeof *attributes);
    attributes->multiprocessors = (unsigned)number_or(&call, K_sm_count, 0);
    attributes->copy_engines = (unsigned)number_or(&call, K_copy_engines, 0);
    attributes->gpu_slices = (unsigned)number_or(&call, K_gi_slices, 0);
    attributes->compute_slices = (unsigned)number_or(&call, K_ci_slices, 0);
    attributes->mebibytes = (u64)(number_or(&call, K_mem_total, 0) / 1048576);
    return OK;
}

API ret_t nvmlDeviceGetAttributes(handle_t device, struct attributes *attributes) {
    return nvmlDeviceGetAttributes_v2(device, attributes);
}
