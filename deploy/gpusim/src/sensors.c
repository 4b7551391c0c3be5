/* Utilization, memory, temperature, power, clocks and their limits, ECC. */
#include <stdlib.h>

#include "sim.h"

struct utilization {
    unsigned gpu, memory;
};

API ret_t nvmlDeviceGetUtilizationRates(handle_t device, struct utilization *rates) {
    OPEN(call, device, SENSOR);
    if (rates == NULL)
        return INVALID_ARGUMENT;
    if (number_or(&call, K_mig_mode, 0) >= 1)
        return NOT_SUPPORTED; /* the driver has no such figure in MIG mode */
    ret_t code = number_unsigned(&call, K_util, 1, &rates->gpu);
    return code != OK ? code : number_unsigned(&call, K_mem_util, 1, &rates->memory);
}

#define SAMPLING_MICROSECONDS 166666

#define ENGINE(function, key) \
    API ret_t function(handle_t device, unsigned *utilization, unsigned *period) { \
        OPEN(call, device, SENSOR); \
        if (period == NULL) \
            return INVALID_ARGUMENT; \
        *period = SAMPLING_MICROSECONDS; \
        return number_unsigned(&call, key, 1, utilization); \
    }

ENGINE(nvmlDeviceGetEncoderUtilization, K_enc_util)
ENGINE(nvmlDeviceGetDecoderUtilization, K_dec_util)
ENGINE(nvmlDeviceGetJpgUtilization, K_jpg_util)
ENGINE(nvmlDeviceGetOfaUtilization, K_ofa_util)

struct memory {
    u64 total, free, used;
};

struct memory_v2 {
    unsigned version;
    u64 total, reserved, free, used;
};

static ret_t memory_info(const struct call *call, struct memory_v2 *memory) {
    double size;
    if (!number(call, K_mem_total, &size))
        return NOT_SUPPORTED;
    memory->total = (u64)size;
    memory->reserved = (u64)number_or(call, K_mem_reserved, 0);
    memory->used = (u64)memory_used(call);
    u64 taken = memory->reserved + memory->used;
    memory->free = taken < memory->total ? memory->total - taken : 0;
    return OK;
}

/* The first form counts what is reserved as used: total = used + free. */
API ret_t nvmlDeviceGetMemoryInfo(handle_t device, struct memory *memory) {
    OPEN(call, device, ANY_DEVICE);
    if (memory == NULL)
        return INVALID_ARGUMENT;
    struct memory_v2 info;
    ret_t code = memory_info(&call, &info);
    if (code == OK)
        *memory = (struct memory){.total = info.total, .free = info.free, .used = info.total - info.free};
    return code;
}

API ret_t nvmlDeviceGetMemoryInfo_v2(handle_t device, struct memory_v2 *memory) {
    OPEN(call, device, ANY_DEVICE);
    if (memory == NULL)
        return INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2 << 24))
        return VERSION_MISMATCH;
    return memory_info(&call, memory);
}

API ret_t nvmlDeviceGetBAR1MemoryInfo(handle_t device, struct memory *memory) {
    OPEN(call, device, ANY_DEVICE);
    double size;
    if (memory == NULL)
        return INVALID_ARGUMENT;
    if (!number(&call, K_bar1_total, &size))
        return NOT_SUPPORTED;
    double used = number_or(&call, K_bar1_used, 0);
    *memory = (struct memory){.total = (u64)size, .free = (u64)(size - used), .used = (u64)used};
    return OK;
}

API ret_t nvmlDeviceGetTemperature(handle_t device, unsigned sensor, unsigned *temperature) {
    OPEN(call, device, SENSOR);
    return sensor != 0 ? INVALID_ARGUMENT : number_unsigned(&call, K_temp, 1, temperature);
}

struct temperature {
    unsigned version, sensor;
    int temperature;
};

API ret_t nvmlDeviceGetTemperatureV(handle_t device, struct temperature *temperature) {
    OPEN(call, device, SENSOR);
    unsigned value;
    if (temperature == NULL || temperature->sensor != 0)
        return INVALID_ARGUMENT;
    if (temperature->version != (sizeof *temperature | 1 << 24))
        return VERSION_MISMATCH;
    ret_t code = number_unsigned(&call, K_temp, 1, &value);
    if (code == OK)
        temperature->temperature = (int)value;
    return code;
}

API ret_t nvmlDeviceGetTemperatureThreshold(handle_t device, unsigned which, unsigned *temperature) {
    OPEN(call, device, SENSOR);
    static const enum key keys[] = {K_temp_shutdown, K_temp_slowdown, K_temp_mem_max, K_temp_gpu_max};
    if (which >= 8)
        return INVALID_ARGUMENT;
    return which >= 4 ? NOT_SUPPORTED : number_unsigned(&call, keys[which], 1, temperature);
}

struct margin {
    unsigned version;
    int margin;
};

API ret_t nvmlDeviceGetMarginTemperature(handle_t device, struct margin *margin) {
    OPEN(call, device, SENSOR);
    double limit, now;
    if (margin == NULL)
        return INVALID_ARGUMENT;
    if (margin->version != (sizeof *margin | 1 << 24))
        return VERSION_MISMATCH;
    if (!number(&call, K_temp_gpu_max, &limit) || !number(&call, K_temp, &now))
        return NOT_SUPPORTED;
    margin->margin = (int)(limit - now);
    return OK;
}

/* Since Ampere the driver gives the mean of the last second here; the instant is field 186. */
API ret_t nvmlDeviceGetPowerUsage(handle_t device, unsigned *milliwatts) {
    OPEN(call, device, SENSOR);
    double watts;
    if (milliwatts == NULL)
        return INVALID_ARGUMENT;
    if (!mean(&call, K_power, 1, &watts))
        return NOT_SUPPORTED;
    *milliwatts = (unsigned)(watts * 1000 + 0.5);
    return OK;
}

API ret_t nvmlDeviceGetTotalEnergyConsumption(handle_t device, u64 *millijoules) {
    OPEN(call, device, SENSOR);
    double joules;
    if (millijoules == NULL)
        return INVALID_ARGUMENT;
    if (!total(&call, K_power, &joules))
        return NOT_SUPPORTED;
    *millijoules = (u64)(joules * 1000);
    return OK;
}

#define LIMIT(function, key) \
    API ret_t function(handle_t device, unsigned *milliwatts) { \
        OPEN(call, device, SENSOR); \
        return number_unsigned(&call, key, 1000, milliwatts); \
    }

LIMIT(nvmlDeviceGetPowerManagementLimit, K_power_limit)
LIMIT(nvmlDeviceGetPowerManagementDefaultLimit, K_power_default)
LIMIT(nvmlDeviceGetEnforcedPowerLimit, K_power_enforced)

API ret_t nvmlDeviceGetPowerManagementLimitConstraints(handle_t device, unsigned *least, unsigned *most) {
    OPEN(call, device, SENSOR);
    ret_t code = number_unsigned(&call, K_power_min, 1000, least);
    return code != OK ? code : number_unsigned(&call, K_power_max, 1000, most);
}

API ret_t nvmlDeviceGetPowerManagementMode(handle_t device, unsigned *mode) {
    OPEN(call, device, SENSOR);
    if (mode == NULL)
        return INVALID_ARGUMENT;
    if (!call.k->given[K_power_limit])
        return NOT_SUPPORTED;
    *mode = 1;
    return OK;
}

static const enum key clocks[] = {K_clock_graphics, K_clock_sm, K_clock_mem, K_clock_video};
static const enum key max_clocks[] = {K_max_graphics, K_max_sm, K_max_mem, K_max_video};

API ret_t nvmlDeviceGetClockInfo(handle_t device, unsigned type, unsigned *mhz) {
    OPEN(call, device, SENSOR);
    return type >= 4 ? INVALID_ARGUMENT : number_unsigned(&call, clocks[type], 1, mhz);
}

API ret_t nvmlDeviceGetMaxClockInfo(handle_t device, unsigned type, unsigned *mhz) {
    OPEN(call, device, SENSOR);
    return type >= 4 ? INVALID_ARGUMENT : number_unsigned(&call, max_clocks[type], 1, mhz);
}

API ret_t nvmlDeviceGetMaxCustomerBoostClock(handle_t device, unsigned type, unsigned *mhz) {
    OPEN(call, device, SENSOR);
    return type >= 4 ? INVALID_ARGUMENT : number_unsigned(&call, max_clocks[type], 1, mhz);
}

API ret_t nvmlDeviceGetApplicationsClock(handle_t device, unsigned type, unsigned *mhz) {
    OPEN(call, device, SENSOR);
    return type >= 4 ? INVALID_ARGUMENT : number_unsigned(&call, max_clocks[type], 1, mhz);
}

API ret_t nvmlDeviceGetClock(handle_t device, unsigned type, unsigned id, unsigned *mhz) {
    OPEN(call, device, SENSOR);
    if (type >= 4 || id >= 4)
        return INVALID_ARGUMENT;
    return number_unsigned(&call, id == 0 ? clocks[type] : max_clocks[type], 1, mhz);
}

/* Bit n of the reasons is the n-th of these; a reason is on where its share of time is 0.5 or more. */
static const enum key reasons[] = {
    K_throttle_idle,       K_throttle_app_clocks,  K_throttle_sw_power,   K_throttle_hw_slowdown,
    K_throttle_sync_boost, K_throttle_sw_thermal,  K_throttle_hw_thermal, K_throttle_hw_power_brake,
    K_throttle_display,
};
#define REASONS (sizeof reasons / sizeof reasons[0])

static ret_t event_reasons(const struct call *call, u64 *bits) {
    if (bits == NULL)
        return INVALID_ARGUMENT;
    *bits = 0;
    for (unsigned i = 0; i < REASONS; i++)
        if (number_or(call, reasons[i], 0) >= 0.5)
            *bits |= 1ULL << i;
    return OK;
}

API ret_t nvmlDeviceGetCurrentClocksEventReasons(handle_t device, u64 *bits) {
    OPEN(call, device, SENSOR);
    return event_reasons(&call, bits);
}

API ret_t nvmlDeviceGetCurrentClocksThrottleReasons(handle_t device, u64 *bits) {
    OPEN(call, device, SENSOR);
    return event_reasons(&call, bits);
}

static ret_t supported_reasons(u64 *bits) {
    if (bits == NULL)
        return INVALID_ARGUMENT;
    *bits = (1ULL << REASONS) - 1;
    return OK;
}

API ret_t nvmlDeviceGetSupportedClocksEventReasons(handle_t device, u64 *bits) {
    OPEN(call, device, SENSOR);
    return supported_reasons(bits);
}

API ret_t nvmlDeviceGetSupportedClocksThrottleReasons(handle_t device, u64 *bits) {
    OPEN(call, device, SENSOR);
    return supported_reasons(bits);
}

API ret_t nvmlDeviceGetEccMode(handle_t device, unsigned *current, unsigned *pending) {
    OPEN(call, device, GPU_ONLY);
    ret_t code = number_unsigned(&call, K_ecc_mode, 1, current);
    return code != OK ? code : number_unsigned(&call, K_ecc_mode, 1, pending);
}

static const enum key ecc[2][2] = {{K_ecc_vol_cor, K_ecc_agg_cor}, {K_ecc_vol_unc, K_ecc_agg_unc}};

static ret_t ecc_count(const struct call *call, unsigned error, unsigned counter, u64 *count) {
    double value;
    if (count == NULL || error > 1 || counter > 1)
        return INVALID_ARGUMENT;
    if (number_or(call, K_ecc_mode, 0) < 1 || !number(call, ecc[error][counter], &value))
        return NOT_SUPPORTED;
    *count = (u64)value;
    return OK;
}

API ret_t nvmlDeviceGetTotalEccErrors(handle_t device, unsigned error, unsigned counter, u64 *count) {
    OPEN(call, device, SENSOR);
    return ecc_count(&call, error, counter, count);
}

/* All simulated errors happen in device memory (location 2). */
API ret_t nvmlDeviceGetMemoryErrorCounter(handle_t device, unsigned error, unsigned counter, unsigned location,
                                          u64 *count) {
    OPEN(call, device, SENSOR);
    ret_t code = location > 7 ? INVALID_ARGUMENT : ecc_count(&call, error, counter, count);
    if (code == OK && location != 2)
        *count = 0;
    return code;
}
