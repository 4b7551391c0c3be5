/* Numbers: utilization, memory, temperature, power, clocks and their limits, ECC, worn-out memory. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "sim.h"

const char *text_of(const struct device *device, const char *name) {
    const struct setting *setting = find(device, name);
    return setting == NULL ? "" : setting->text;
}

bool number(const struct call *call, const char *name, double *value) {
    const struct setting *setting = find(call->device, name);
    if (setting != NULL)
        *value = curve_value(&setting->curve, call->t);
    return setting != NULL;
}

double number_or(const struct call *call, const char *name, double otherwise) {
    number(call, name, &otherwise);
    return otherwise;
}

ret_t number_unsigned(const struct call *call, const char *name, double scale, unsigned *value) {
    double found;
    if (!number(call, name, &found))
        return NOT_SUPPORTED;
    *value = (unsigned)(found * scale + 0.5);
    return OK;
}

bool total(const struct call *call, const char *rate, double *value) {
    char base[sizeof(((struct setting *)NULL)->name)];
    const struct setting *setting = find(call->device, rate);
    snprintf(base, sizeof base, "%s_base", rate);
    if (setting != NULL)
        *value = number_or(call, base, 0) + curve_integral(&setting->curve, call->t);
    return setting != NULL;
}

ret_t copy_text(const char *text, char *buffer, unsigned size) {
    if (buffer == NULL)
        return INVALID_ARGUMENT;
    if (*text == '\0')
        return NOT_SUPPORTED;
    return snprintf(buffer, size, "%s", text) < (int)size ? OK : INSUFFICIENT_SIZE;
}

/* Functions that give one number, times what turns it into the driver's unit. */
#define UNSIGNED(function, key, scale, scope) \
    API ret_t function(handle_t device, unsigned *value) { \
        OPEN(call, device, scope); \
        return number_unsigned(&call, key, scale, value); \
    }
UNSIGNED(nvmlDeviceGetMinorNumber, "minor", 1, GPU_ONLY)
UNSIGNED(nvmlDeviceGetPersistenceMode, "persistence", 1, GPU_ONLY)
UNSIGNED(nvmlDeviceGetComputeMode, "compute_mode", 1, ANY_DEVICE)
UNSIGNED(nvmlDeviceGetDisplayMode, "display_mode", 1, GPU_ONLY)
UNSIGNED(nvmlDeviceGetDisplayActive, "display_active", 1, GPU_ONLY)
UNSIGNED(nvmlDeviceGetPerformanceState, "pstate", 1, SENSOR)
UNSIGNED(nvmlDeviceGetFanSpeed, "fan", 1, SENSOR)
UNSIGNED(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen", 1, SENSOR)
UNSIGNED(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 1, SENSOR)
UNSIGNED(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_max_gen", 1, SENSOR)
UNSIGNED(nvmlDeviceGetMaxPcieLinkWidth, "pcie_max_width", 1, SENSOR)
UNSIGNED(nvmlDeviceGetPowerUsage, "power", 1000, SENSOR)
UNSIGNED(nvmlDeviceGetPowerManagementLimit, "power_limit", 1000, SENSOR)
UNSIGNED(nvmlDeviceGetEnforcedPowerLimit, "power_enforced", 1000, SENSOR)
UNSIGNED(nvmlDeviceGetGpuInstanceId, "gi", 1, ANY_DEVICE)
UNSIGNED(nvmlDeviceGetComputeInstanceId, "ci", 1, ANY_DEVICE)

#define ENGINE(function, key) \
    API ret_t function(handle_t device, unsigned *utilization, unsigned *microseconds) { \
        OPEN(call, device, SENSOR); \
        *microseconds = 166666; /* between two samples of the driver's */ \
        return number_unsigned(&call, key, 1, utilization); \
    }
ENGINE(nvmlDeviceGetEncoderUtilization, "enc_util")
ENGINE(nvmlDeviceGetDecoderUtilization, "dec_util")

/* Functions with a choice of numbers; the driver knows those without a name, but has none for them. */
#define CHOICE(function, ...) \
    API ret_t function(handle_t device, unsigned which, unsigned *value) { \
        OPEN(call, device, SENSOR); \
        static const char *const keys[] = {__VA_ARGS__}; \
        return which >= COUNT(keys) ? INVALID_ARGUMENT : number_unsigned(&call, keys[which], 1, value); \
    }
CHOICE(nvmlDeviceGetTemperature, "temp")
CHOICE(nvmlDeviceGetTemperatureThreshold, "temp_shutdown", "temp_slowdown", "temp_mem_max")
CHOICE(nvmlDeviceGetClockInfo, "clock_graphics", "clock_sm", "clock_mem", "clock_video")
CHOICE(nvmlDeviceGetMaxClockInfo, "max_graphics", "max_sm", "max_mem", "max_video")

struct temperature {
    unsigned version, sensor;
    int temperature;
};

API ret_t nvmlDeviceGetTemperatureV(handle_t device, struct temperature *temperature) {
    OPEN(call, device, SENSOR);
    if (temperature->version != VERSION(*temperature, 1))
        return VERSION_MISMATCH;
    return temperature->sensor != 0 ? INVALID_ARGUMENT
                                    : number_unsigned(&call, "temp", 1, (unsigned *)&temperature->temperature);
}

struct utilization {
    unsigned gpu, memory;
};

API ret_t nvmlDeviceGetUtilizationRates(handle_t device, struct utilization *rates) {
    OPEN(call, device, SENSOR);
    if (number_or(&call, "mig_mode", 0) >= 1)
        return NOT_SUPPORTED; /* the driver has no such figure in MIG mode */
    ret_t code = number_unsigned(&call, "util", 1, &rates->gpu);
    return code != OK ? code : number_unsigned(&call, "mem_util", 1, &rates->memory);
}

struct memory {
    u64 total, free, used;
};

struct memory_v2 {
    unsigned version;
    u64 total, reserved, free, used;
};

/* mem_used where it is given; else what the device itself takes and what its processes hold. */
static ret_t memory_info(const struct call *call, struct memory_v2 *memory) {
    double size, used;
    if (!number(call, "mem_total", &size))
        return NOT_SUPPORTED;
    if (!number(call, "mem_used", &used))
        used = number_or(call, "mem_base", 0) + processes_memory(call);
    memory->total = (u64)size;
    memory->reserved = (u64)number_or(call, "mem_reserved", 0);
    memory->used = (u64)used;
    u64 taken = memory->reserved + memory->used;
    memory->free = taken < memory->total ? memory->total - taken : 0;
    return OK;
}

/* The first form counts what is reserved as used: total = used + free. */
API ret_t nvmlDeviceGetMemoryInfo(handle_t device, struct memory *memory) {
    OPEN(call, device, ANY_DEVICE);
    struct memory_v2 info = {0};
    ret_t code = memory_info(&call, &info);
    *memory = (struct memory){.total = info.total, .free = info.free, .used = info.total - info.free};
    return code;
}

API ret_t nvmlDeviceGetMemoryInfo_v2(handle_t device, struct memory_v2 *memory) {
    OPEN(call, device, ANY_DEVICE);
    return memory->version != VERSION(*memory, 2) ? VERSION_MISMATCH : memory_info(&call, memory);
}

API ret_t nvmlDeviceGetBAR1MemoryInfo(handle_t device, struct memory *memory) {
    OPEN(call, device, ANY_DEVICE);
    double size = 0, used = number_or(&call, "bar1_used", 0);
    bool known = number(&call, "bar1_total", &size);
    *memory = (struct memory){.total = (u64)size, .free = (u64)(size - used), .used = (u64)used};
    return known ? OK : NOT_SUPPORTED;
}

API ret_t nvmlDeviceGetTotalEnergyConsumption(handle_t device, u64 *millijoules) {
    OPEN(call, device, SENSOR);
    double joules = 0;
    bool known = total(&call, "power", &joules);
    *millijoules = (u64)(joules * 1000);
    return known ? OK : NOT_SUPPORTED;
}

/* Bit n is the n-th reason. It is on in that share of the seconds: they are spread by the golden ratio, so that any
   stretch of them has about that share. */
API ret_t nvmlDeviceGetCurrentClocksEventReasons(handle_t device, u64 *bits) {
    OPEN(call, device, SENSOR);
    static const char *const reasons[] = {
        "throttle_idle",        "throttle_app_clocks", "throttle_sw_power",   "throttle_hw_slowdown",
        "throttle_sync_boost",  "throttle_sw_thermal", "throttle_hw_thermal", "throttle_hw_power_brake",
        "throttle_display",
    };
    double spread = fmod(floor(call.t) * 0.6180339887498949, 1);
    *bits = 0;
    for (unsigned i = 0; i < COUNT(reasons); i++)
        *bits |= (u64)(spread < number_or(&call, reasons[i], 0)) << i;
    return OK;
}
ALIAS(nvmlDeviceGetCurrentClocksThrottleReasons, nvmlDeviceGetCurrentClocksEventReasons)

API ret_t nvmlDeviceGetTotalEccErrors(handle_t device, unsigned error, unsigned counter, u64 *count) {
    OPEN(call, device, SENSOR);
    static const char *const keys[2][2] = {{"ecc_vol_cor", "ecc_agg_cor"}, {"ecc_vol_unc", "ecc_agg_unc"}};
    double errors;
    if (error > 1 || counter > 1)
        return INVALID_ARGUMENT;
    if (number_or(&call, "ecc_mode", 0) < 1 || !number(&call, keys[error][counter], &errors))
        return NOT_SUPPORTED;
    *count = (u64)errors;
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
NEVER(nvmlDeviceGetConfComputeMemSizeInfo)
NEVER(nvmlDeviceGetRunningProcessDetailList) /* nvitop only looks whether it is there */
