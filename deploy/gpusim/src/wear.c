/* Memory that is worn out, relations between devices, and what the simulator never supports. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

/* Addresses are made up: one page of 64 KiB after the other. */
static ret_t retired(const struct call *call, unsigned cause, unsigned *count, u64 *addresses, u64 *times) {
    double pages;
    if (count == NULL || cause > 1)
        return INVALID_ARGUMENT;
    if (!number(call, cause == 0 ? K_retired_sbe : K_retired_dbe, &pages))
        return NOT_SUPPORTED;
    unsigned most = *count, all = (unsigned)pages;
    *count = all;
    if (all > 0 && (addresses == NULL || most < all))
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < all; i++) {
        addresses[i] = (u64)(2 * i + cause + 1) << 16;
        if (times != NULL)
            times[i] = (u64)(call->state->epoch * 1e6);
    }
    return OK;
}

API ret_t nvmlDeviceGetRetiredPages(handle_t device, unsigned cause, unsigned *count, u64 *addresses) {
    OPEN(call, device, SENSOR);
    return retired(&call, cause, count, addresses, NULL);
}

API ret_t nvmlDeviceGetRetiredPages_v2(handle_t device, unsigned cause, unsigned *count, u64 *addresses, u64 *times) {
    OPEN(call, device, SENSOR);
    return retired(&call, cause, count, addresses, times);
}

API ret_t nvmlDeviceGetRetiredPagesPendingStatus(handle_t device, unsigned *pending) {
    OPEN(call, device, SENSOR);
    return number_unsigned(&call, K_retired_pending, 1, pending);
}

API ret_t nvmlDeviceGetRemappedRows(handle_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                    unsigned *failed) {
    OPEN(call, device, SENSOR);
    ret_t code = number_unsigned(&call, K_remapped_cor, 1, corrected);
    if (code == OK)
        code = number_unsigned(&call, K_remapped_unc, 1, uncorrected);
    if (code == OK)
        code = number_unsigned(&call, K_remapped_pending, 1, pending);
    return code != OK ? code : number_unsigned(&call, K_remapped_failure, 1, failed);
}

/* Devices on the same NUMA node are one PCIe host bridge apart, others the link between sockets. */
API ret_t nvmlDeviceGetTopologyCommonAncestor(handle_t one, handle_t other, unsigned *level) {
    OPEN(call, one, GPU_ONLY);
    OPEN(second, other, GPU_ONLY);
    if (level == NULL)
        return INVALID_ARGUMENT;
    *level = strcmp(call.k->text[T_numa], second.k->text[T_numa]) == 0 ? 30 : 50;
    if (call.index == second.index)
        *level = 0;
    return OK;
}

API ret_t nvmlDeviceOnSameBoard(handle_t one, handle_t other, int *same) {
    OPEN(call, one, GPU_ONLY);
    OPEN(second, other, GPU_ONLY);
    if (same == NULL)
        return INVALID_ARGUMENT;
    *same = call.index == second.index;
    return OK;
}

/* Functions of the real library that no simulated device supports: they look at nothing but the device. */
#define NEVER(function) \
    API ret_t function(handle_t device) { \
        OPEN(call, device, ANY_DEVICE); \
        return NOT_SUPPORTED; \
    }

NEVER(nvmlDeviceGetDriverModel) /* Windows only */
NEVER(nvmlDeviceGetDriverModel_v2)
NEVER(nvmlDeviceGetAccountingMode)
NEVER(nvmlDeviceSetAccountingMode)
NEVER(nvmlDeviceGetAccountingStats)
NEVER(nvmlDeviceGetAccountingPids)
NEVER(nvmlDeviceGetAccountingBufferSize)
NEVER(nvmlDeviceClearAccountingPids)
NEVER(nvmlDeviceGetNumaNodeId) /* of a GPU whose memory is a node of the host: Grace */
NEVER(nvmlDeviceGetConfComputeMemSizeInfo)
NEVER(nvmlDeviceGetFanSpeed_v2)
NEVER(nvmlDeviceGetNumFans)
NEVER(nvmlDeviceGetEncoderStats)
NEVER(nvmlDeviceGetFBCStats)
NEVER(nvmlDeviceGetGpuOperationMode)
NEVER(nvmlDeviceGetBridgeChipInfo)
NEVER(nvmlDeviceGetInforomVersion)
NEVER(nvmlDeviceGetInforomImageVersion)
NEVER(nvmlDeviceGetVirtualizationMode)
NEVER(nvmlDeviceGetActiveVgpus)
NEVER(nvmlDeviceGetSupportedVgpus)
NEVER(nvmlDeviceGetAutoBoostedClocksEnabled)
NEVER(nvmlDeviceGetDefaultApplicationsClock)
NEVER(nvmlDeviceGetSupportedMemoryClocks)
NEVER(nvmlDeviceGetSupportedGraphicsClocks)
NEVER(nvmlDeviceGetRowRemapperHistogram)
NEVER(nvmlDeviceGetDetailedEccErrors)
NEVER(nvmlDeviceGetP2PStatus)
NEVER(nvmlDeviceGetTopologyNearestGpus)
NEVER(nvmlDeviceGetNvLinkCapability)
NEVER(nvmlDeviceGetNvLinkUtilizationCounter)
NEVER(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NEVER(nvmlDeviceGetNvLinkRemoteDeviceType)
NEVER(nvmlDeviceGetGpuFabricInfo)
NEVER(nvmlDeviceGetGpuFabricInfoV)
NEVER(nvmlDeviceGetGspFirmwareVersion)
NEVER(nvmlDeviceGetGspFirmwareMode)
NEVER(nvmlDeviceGetPowerSource)
NEVER(nvmlDeviceGetIrqNum)
NEVER(nvmlDeviceGetBusType)
NEVER(nvmlDeviceGetThermalSettings)
NEVER(nvmlDeviceGetDynamicPstatesInfo)
NEVER(nvmlGpmSetStreamingEnabled)
