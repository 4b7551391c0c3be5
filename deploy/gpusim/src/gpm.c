/* GPU performance monitoring: means between two samples of one device. */
#include <stdio.h>
#include <stdlib.h>

#include "sim.h"

enum { GPM_VERSION = 1 };
static const double MEBIBYTES = 1.0 / 1048576;

/* Metric id and the rate in the state: bytes of PCIe (20 and later) and of each link (60 and later), else percent. */
static const struct {
    unsigned id;
    const char *rate;
} metrics[] = {
    {1, "gpm_graphics"}, {2, "gpm_sm"}, {3, "gpm_occupancy"}, {5, "gpm_tensor"}, {10, "gpm_dram"},
    {20, "pcie_tx"}, {21, "pcie_rx"}, {60, "nvlink_rx"}, {61, "nvlink_tx"},
};

struct gpm_sample {
    double when; /* 0: none was taken yet */
    unsigned generation, gpu;
    unsigned gi; /* NO_INSTANCE: the whole GPU */
    bool given[COUNT(metrics)];
    double total[COUNT(metrics)];
};

struct gpm_metric {
    unsigned id;
    ret_t code;
    double value;
    const char *short_name, *long_name, *unit;
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
    if (support->version != GPM_VERSION)
        return VERSION_MISMATCH;
    call.device = &call.gpu->self;
    support->supported = number_or(&call, "gpm", 0) >= 1;
    return OK;
}

API ret_t nvmlGpmSampleAlloc(struct gpm_sample **sample) {
    OPEN(call, NULL, SYSTEM);
    *sample = calloc(1, sizeof **sample);
    return OK;
}

API ret_t nvmlGpmSampleFree(struct gpm_sample *sample) {
    OPEN(call, NULL, SYSTEM);
    free(sample);
    return OK;
}

static ret_t take(struct call *call, unsigned gi, struct gpm_sample *sample) {
    if (call->is_mig || number_or(call, "gpm", 0) < 1)
        return NOT_SUPPORTED;
    double links = number_or(call, "nvlink_links", 0);
    bool whole = gi == NO_INSTANCE;
    for (unsigned m = 0; m < call->gpu->migs && !whole; m++) {
        call->device = &call->gpu->mig[m];
        whole = number_or(call, "gi", -1) == gi;
    }
    if (!whole)
        return INVALID_ARGUMENT;
    *sample = (struct gpm_sample){call->now, call->state->generation, call->index, gi, {0}, {0}};
    for (unsigned i = 0; i < COUNT(metrics); i++) {
        sample->given[i] = total(call, metrics[i].rate, &sample->total[i]);
        sample->total[i] *= metrics[i].id >= 60 ? links * MEBIBYTES : metrics[i].id >= 20 ? MEBIBYTES : 1;
    }
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
    const struct gpm_sample *one = query->one, *two = query->two;
    if (query->version != GPM_VERSION)
        return VERSION_MISMATCH;
    if (one == NULL || two == NULL || one->when == 0 || two->when == 0 || one->gpu != two->gpu || one->gi != two->gi ||
        one->generation != two->generation)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < query->count; i++) {
        struct gpm_metric *metric = &query->metric[i];
        char name[32];
        snprintf(name, sizeof name, "gpm:%u", metric->id);
        ret_t fault = fault_code(&call, name, -1);
        metric->code = fault != OK ? fault : NOT_SUPPORTED;
        for (unsigned m = 0; m < COUNT(metrics) && fault == OK; m++) {
            if (metrics[m].id != metric->id || !one->given[m] || !two->given[m])
                continue;
            metric->code = two->when > one->when ? OK : INVALID_ARGUMENT;
            metric->value = (two->total[m] - one->total[m]) / (two->when - one->when);
        }
    }
    return OK;
}
