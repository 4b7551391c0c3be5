/* GPU performance monitoring: means between two samples of one device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { GPM_VERSION = 1 };

/* Metric id, the rate in the state, and what one unit of the rate counts. */
static const struct {
    unsigned id;
    enum key rate;
    double scale;
    const char *name, *unit;
} metrics[] = {
    {1, K_gpm_graphics, 1, "GRAPHICS_UTIL", "%"},
    {2, K_gpm_sm, 1, "SM_UTIL", "%"},
    {3, K_gpm_occupancy, 1, "SM_OCCUPANCY", "%"},
    {4, K_gpm_integer, 1, "INTEGER_UTIL", "%"},
    {5, K_gpm_tensor, 1, "ANY_TENSOR_UTIL", "%"},
    {6, K_gpm_dfma, 1, "DFMA_TENSOR_UTIL", "%"},
    {7, K_gpm_hmma, 1, "HMMA_TENSOR_UTIL", "%"},
    {9, K_gpm_imma, 1, "IMMA_TENSOR_UTIL", "%"},
    {10, K_gpm_dram, 1, "DRAM_BW_UTIL", "%"},
    {11, K_gpm_fp64, 1, "FP64_UTIL", "%"},
    {12, K_gpm_fp32, 1, "FP32_UTIL", "%"},
    {13, K_gpm_fp16, 1, "FP16_UTIL", "%"},
    {20, K_pcie_tx, 1.0 / 1048576, "PCIE_TX_PER_SEC", "MiB/s"},
    {21, K_pcie_rx, 1.0 / 1048576, "PCIE_RX_PER_SEC", "MiB/s"},
    {60, K_nvlink_rx, 1.0 / 1048576, "NVLINK_TOTAL_RX_PER_SEC", "MiB/s"},
    {61, K_nvlink_tx, 1.0 / 1048576, "NVLINK_TOTAL_TX_PER_SEC", "MiB/s"},
};
#define METRICS (sizeof metrics / sizeof metrics[0])

struct gpm_sample {
    bool taken;
    double when;
    unsigned generation, gpu;
    unsigned gi; /* NO_INSTANCE: the whole GPU */
    bool given[METRICS];
    double total[METRICS];
};

struct gpm_metric {
    unsigned id;
    ret_t code;
    double value;
    struct {
        const char *short_name, *long_name, *unit;
    } info;
};

struct gpm_query {
    unsigned version, count;
    struct gpm_sample *one, *two;
    struct gpm_metric metric[];
};

struct gpm_support {
    unsigned version, supported;
};

API ret_t nvmlGpmQueryDeviceSupport(handle_t device, struct gpm_support *support) {
    OPEN(call, device, ANY_DEVICE);
    if (support == NULL)
        return INVALID_ARGUMENT;
    if (support->version != GPM_VERSION)
        return VERSION_MISMATCH;
    support->supported = call.gpu->k.given[K_gpm] && curve_value(&call.gpu->k.number[K_gpm], call.t) >= 1;
    return OK;
}

API ret_t nvmlGpmSampleAlloc(struct gpm_sample **sample) {
    OPEN(call, NULL, SYSTEM);
    if (sample == NULL)
        return INVALID_ARGUMENT;
    *sample = calloc(1, sizeof **sample);
    return *sample == NULL ? MEMORY : OK;
}

API ret_t nvmlGpmSampleFree(struct gpm_sample *sample) {
    OPEN(call, NULL, SYSTEM);
    if (sample == NULL)
        return INVALID_ARGUMENT;
    free(sample);
    return OK;
}

static ret_t take(struct call *call, unsigned gi, struct gpm_sample *sample) {
    if (sample == NULL)
        return INVALID_ARGUMENT;
    if (call->mig != NULL || number_or(call, K_gpm, 0) < 1)
        return NOT_SUPPORTED;
    bool whole = gi == NO_INSTANCE;
    for (unsigned m = 0; m < call->gpu->migs && !whole; m++)
        if (curve_value(&call->gpu->mig[m]->number[K_gi], 0) == gi) {
            call->k = call->gpu->mig[m];
            whole = true;
        }
    if (!whole)
        return INVALID_ARGUMENT;
    *sample = (struct gpm_sample){
        .taken = true,
        .when = call->now,
        .generation = call->state->generation,
        .gpu = call->index,
        .gi = gi,
    };
    for (unsigned i = 0; i < METRICS; i++)
        sample->given[i] = total(call, metrics[i].rate, &sample->total[i]);
    double links = number_or(call, K_nvlink_links, 0);
    for (unsigned i = 0; i < METRICS; i++)
        if (metrics[i].rate == K_nvlink_rx || metrics[i].rate == K_nvlink_tx)
            sample->total[i] *= links;
    return OK;
}

API ret_t nvmlGpmSampleGet(handle_t device, struct gpm_sample *sample) {
    OPEN(call, device, ANY_DEVICE);
    return take(&call, NO_INSTANCE, sample);
}

API ret_t nvmlGpmMigSampleGet(handle_t device, unsigned gi, struct gpm_sample *sample) {
    OPEN(call, device, ANY_DEVICE);
    return take(&call, gi, sample);
}

API ret_t nvmlGpmMetricsGet(struct gpm_query *query) {
    OPEN(call, NULL, SYSTEM);
    if (query == NULL || query->one == NULL || query->two == NULL)
        return INVALID_ARGUMENT;
    if (query->version != GPM_VERSION)
        return VERSION_MISMATCH;
    const struct gpm_sample *one = query->one, *two = query->two;
    if (!one->taken || !two->taken || one->gpu != two->gpu || one->gi != two->gi || one->generation != two->generation)
        return INVALID_ARGUMENT;
    double seconds = two->when - one->when;
    for (unsigned i = 0; i < query->count; i++) {
        struct gpm_metric *metric = &query->metric[i];
        char name[32];
        snprintf(name, sizeof name, "gpm:%u", metric->id);
        ret_t fault = fault_code(&call, name);
        metric->code = fault != OK ? fault : NOT_SUPPORTED;
        for (unsigned m = 0; m < METRICS; m++) {
            if (fault != OK || metrics[m].id != metric->id || !one->given[m] || !two->given[m])
                continue;
            metric->code = seconds > 0 ? OK : INVALID_ARGUMENT;
            if (metric->code == OK)
                metric->value = (two->total[m] - one->total[m]) / seconds * metrics[m].scale;
            metric->info.short_name = metric->info.long_name = metrics[m].name;
            metric->info.unit = metrics[m].unit;
        }
    }
    return OK;
}

API ret_t nvmlGpmQueryIfStreamingEnabled(handle_t device, unsigned *on) {
    OPEN(call, device, GPU_ONLY);
    if (on == NULL)
        return INVALID_ARGUMENT;
    if (number_or(&call, K_gpm, 0) < 1)
        return NOT_SUPPORTED;
    *on = 0;
    return OK;
}
