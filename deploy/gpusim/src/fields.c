/* Field values: many figures of one device in one call. */
#include <math.h>
#include <stdio.h>

#include "sim.h"

enum value_type { DOUBLE, UNSIGNED_INT, UNSIGNED_LONG, UNSIGNED_LONG_LONG };

struct field_value { /* nvmlFieldValue_t */
    unsigned field, scope;
    long long timestamp, latency; /* microseconds */
    int type;
    ret_t code;
    union {
        double real;
        unsigned natural;
        u64 count;
    } value;
};

/* How a field comes from the state. */
enum source { VALUE, TOTAL, MEAN_POWER, ECC };
struct rule {
    unsigned field;
    enum source source;
    enum key key;
    double scale;
    enum value_type type;
};

static const struct rule rules[] = {
    {1, VALUE, K_ecc_mode, 1, UNSIGNED_INT},
    {2, VALUE, K_ecc_mode, 1, UNSIGNED_INT},
    {3, ECC, K_ecc_vol_cor, 1, UNSIGNED_LONG_LONG},
    {4, ECC, K_ecc_vol_unc, 1, UNSIGNED_LONG_LONG},
    {5, ECC, K_ecc_agg_cor, 1, UNSIGNED_LONG_LONG},
    {6, ECC, K_ecc_agg_unc, 1, UNSIGNED_LONG_LONG},
    {11, ECC, K_ecc_vol_cor, 1, UNSIGNED_LONG_LONG},
    {12, ECC, K_ecc_vol_unc, 1, UNSIGNED_LONG_LONG},
    {22, ECC, K_ecc_agg_cor, 1, UNSIGNED_LONG_LONG},
    {23, ECC, K_ecc_agg_unc, 1, UNSIGNED_LONG_LONG},
    {29, VALUE, K_retired_sbe, 1, UNSIGNED_LONG_LONG},
    {30, VALUE, K_retired_dbe, 1, UNSIGNED_LONG_LONG},
    {31, VALUE, K_retired_pending, 1, UNSIGNED_LONG_LONG},
    /* counters of time below a limit: nanoseconds */
    {74, TOTAL, K_throttle_sw_power, 1e9, UNSIGNED_LONG_LONG},
    {76, TOTAL, K_throttle_sync_boost, 1e9, UNSIGNED_LONG_LONG},
    {77, TOTAL, K_throttle_board_limit, 1e9, UNSIGNED_LONG_LONG},
    {78, TOTAL, K_throttle_low_util, 1e9, UNSIGNED_LONG_LONG},
    {79, TOTAL, K_throttle_reliability, 1e9, UNSIGNED_LONG_LONG},
    {80, TOTAL, K_throttle_app_clocks, 1e9, UNSIGNED_LONG_LONG},
    {81, TOTAL, K_throttle_base_clocks, 1e9, UNSIGNED_LONG_LONG},
    {269, TOTAL, K_throttle_sw_thermal, 1e9, UNSIGNED_LONG_LONG},
    {270, TOTAL, K_throttle_hw_thermal, 1e9, UNSIGNED_LONG_LONG},
    {271, TOTAL, K_throttle_hw_power_brake, 1e9, UNSIGNED_LONG_LONG},
    {82, VALUE, K_mem_temp, 1, UNSIGNED_INT},
    {83, TOTAL, K_power, 1000, UNSIGNED_LONG_LONG},
    {90, VALUE, K_nvlink_speed, 1, UNSIGNED_INT},
    {91, VALUE, K_nvlink_links, 1, UNSIGNED_INT},
    {94, VALUE, K_pcie_replay, 1, UNSIGNED_INT},
    {142, VALUE, K_remapped_cor, 1, UNSIGNED_INT},
    {143, VALUE, K_remapped_unc, 1, UNSIGNED_INT},
    {144, VALUE, K_remapped_pending, 1, UNSIGNED_INT},
    {145, VALUE, K_remapped_failure, 1, UNSIGNED_INT},
    {185, MEAN_POWER, K_power, 1000, UNSIGNED_INT},
    {186, VALUE, K_power, 1000, UNSIGNED_INT},
    {187, VALUE, K_power_min, 1000, UNSIGNED_INT},
    {188, VALUE, K_power_max, 1000, UNSIGNED_INT},
    {189, VALUE, K_power_default, 1000, UNSIGNED_INT},
    {190, VALUE, K_power_enforced, 1000, UNSIGNED_INT},
    {192, VALUE, K_power_limit, 1000, UNSIGNED_INT},
    {197, TOTAL, K_pcie_tx, 1, UNSIGNED_LONG_LONG},
    {198, TOTAL, K_pcie_rx, 1, UNSIGNED_LONG_LONG},
};
#define RULES (sizeof rules / sizeof rules[0])

static ret_t by_rule(const struct call *call, const struct rule *rule, double *value) {
    bool known = false;
    switch (rule->source) {
    case ECC:
        if (number_or(call, K_ecc_mode, 0) < 1)
            return NOT_SUPPORTED;
        known = number(call, rule->key, value);
        break;
    case VALUE:
        known = number(call, rule->key, value);
        break;
    case TOTAL:
        known = total(call, rule->key, value);
        break;
    case MEAN_POWER:
        known = mean(call, rule->key, 1, value);
        break;
    }
    *value *= rule->scale;
    return known ? OK : NOT_SUPPORTED;
}

/* Fields whose scope is a link; 0xFFFFFFFF stands for all links together. Data counters are in KiB. */
static ret_t of_link(const struct call *call, unsigned field, unsigned link, double *value) {
    double links = number_or(call, K_nvlink_links, 0);
    if (links == 0)
        return NOT_SUPPORTED;
    if (link != NO_INSTANCE && link >= links)
        return INVALID_ARGUMENT;
    bool known = false;
    double scale = link == NO_INSTANCE ? links : 1;
    switch (field) {
    case 138: case 140: /* transmitted: data, and with the protocol */
        known = total(call, K_nvlink_tx, value), scale /= 1024;
        break;
    case 139: case 141:
        known = total(call, K_nvlink_rx, value), scale /= 1024;
        break;
    case 202: /* bytes; devices of Blackwell and later */
        known = number_or(call, K_nvlink_counts, 0) >= 1 && total(call, K_nvlink_tx, value);
        break;
    case 204:
        known = number_or(call, K_nvlink_counts, 0) >= 1 && total(call, K_nvlink_rx, value);
        break;
    case 161:
        known = number(call, K_nvlink_replay, value);
        break;
    case 162:
        known = number(call, K_nvlink_recovery, value);
        break;
    case 163:
        known = number(call, K_nvlink_crc, value);
        break;
    case 164:
        known = number(call, K_nvlink_speed, value), scale = 1;
        break;
    case 165:
        known = true, *value = 1, scale = 1;
        break;
    default:
        break;
    }
    *value *= scale;
    return known ? OK : NOT_SUPPORTED;
}

/* Totals over all links that have a field of their own. */
static ret_t of_links(const struct call *call, unsigned field, double *value) {
    enum key key;
    switch (field) {
    case 38:
        key = K_nvlink_crc;
        break;
    case 52:
        key = K_nvlink_replay;
        break;
    case 59:
        key = K_nvlink_recovery;
        break;
    default:
        return NOT_SUPPORTED;
    }
    double links = number_or(call, K_nvlink_links, 0);
    if (links == 0 || !number(call, key, value))
        return NOT_SUPPORTED;
    *value *= links;
    return OK;
}

static ret_t thermal(const struct call *call, double *value) {
    double software = 0, hardware = 0;
    bool one = total(call, K_throttle_sw_thermal, &software), other = total(call, K_throttle_hw_thermal, &hardware);
    *value = (software + hardware) * 1e9;
    return one || other ? OK : NOT_SUPPORTED;
}

static void fill(const struct call *call, struct field_value *field) {
    char name[32];
    double value = 0;
    enum value_type type = UNSIGNED_LONG_LONG;
    snprintf(name, sizeof name, "field:%u", field->field);
    field->timestamp = (long long)(call->now * 1e6);
    field->latency = 0;
    field->code = fault_code(call, name);
    if (field->code != OK)
        return;
    const struct rule *rule = NULL;
    for (unsigned i = 0; i < RULES && rule == NULL; i++)
        if (rules[i].field == field->field)
            rule = &rules[i];
    if (call->mig != NULL)
        field->code = NOT_SUPPORTED;
    else if (rule != NULL)
        field->code = by_rule(call, rule, &value), type = rule->type;
    else if (field->field == 75)
        field->code = thermal(call, &value);
    else if (field->field == 38 || field->field == 52 || field->field == 59)
        field->code = of_links(call, field->field, &value);
    else
        field->code = of_link(call, field->field, field->scope, &value);
    if (field->field == 164 || field->field == 165)
        type = UNSIGNED_INT;
    if (field->code != OK)
        return;
    if ((field->field == 197 || field->field == 198) && number_or(call, K_pcie_bits, 32) == 32) {
        value = fmod(value, 4294967296.0);
        type = UNSIGNED_INT;
    }
    field->type = (int)type;
    if (type == UNSIGNED_INT)
        field->value.natural = (unsigned)(value + 0.5 < 4294967296.0 ? value + 0.5 : value);
    else
        field->value.count = (u64)value;
}

API ret_t nvmlDeviceGetFieldValues(handle_t device, int count, struct field_value *fields) {
    OPEN(call, device, ANY_DEVICE);
    if (count <= 0 || fields == NULL)
        return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++)
        fill(&call, &fields[i]);
    return OK;
}

struct violation {
    u64 reference, nanoseconds; /* reference: microseconds since 1970 */
};

API ret_t nvmlDeviceGetViolationStatus(handle_t device, unsigned policy, struct violation *violation) {
    OPEN(call, device, SENSOR);
    if (violation == NULL || policy > 11 || (policy > 5 && policy < 10))
        return INVALID_ARGUMENT;
    struct field_value field = {.field = policy < 6 ? 74 + policy : 70 + policy};
    fill(&call, &field);
    if (field.code == OK)
        *violation = (struct violation){(u64)(call.now * 1e6), field.value.count};
    return field.code;
}

/* The driver counts bytes for 20 ms, and the call lasts as long. */
API ret_t nvmlDeviceGetPcieThroughput(handle_t device, unsigned counter, unsigned *kibibytes) {
    OPEN(call, device, SENSOR);
    static const enum key rates[] = {K_pcie_tx, K_pcie_rx};
    double bytes;
    if (kibibytes == NULL || counter > 1)
        return INVALID_ARGUMENT;
    if (!call.k->given[rates[counter]])
        return NOT_SUPPORTED;
    sleep_seconds(0.02);
    call.now += 0.02;
    call.t += 0.02;
    mean(&call, rates[counter], 0.02, &bytes);
    *kibibytes = (unsigned)(bytes / 1024 + 0.5);
    return OK;
}

#define LINK(call) \
    double links = number_or(&call, K_nvlink_links, 0); \
    if (links == 0) \
        return NOT_SUPPORTED; \
    if (link >= links || value == NULL) \
        return INVALID_ARGUMENT;

API ret_t nvmlDeviceGetNvLinkState(handle_t device, unsigned link, unsigned *value) {
    OPEN(call, device, SENSOR);
    LINK(call)
    *value = 1;
    return OK;
}

API ret_t nvmlDeviceGetNvLinkVersion(handle_t device, unsigned link, unsigned *value) {
    OPEN(call, device, SENSOR);
    LINK(call)
    return number_unsigned(&call, K_nvlink_version, 1, value);
}

API ret_t nvmlDeviceGetNvLinkErrorCounter(handle_t device, unsigned link, unsigned counter, u64 *value) {
    OPEN(call, device, SENSOR);
    static const enum key keys[] = {K_nvlink_replay, K_nvlink_recovery, K_nvlink_crc};
    LINK(call)
    if (counter > 4)
        return INVALID_ARGUMENT;
    if (counter > 2)
        return NOT_SUPPORTED;
    double errors = number_or(&call, keys[counter], 0);
    *value = (u64)errors;
    return OK;
}

struct sample {
    u64 microseconds;
    union {
        double real;
        unsigned natural;
        u64 count;
    } value;
};

#define SAMPLES 120 /* at six a second: the driver keeps the last 20 seconds */

/* Utilization (1) and memory utilization (2): the mean of each sixth of a second. */
API ret_t nvmlDeviceGetSamples(handle_t device, unsigned kind, u64 since, unsigned *type, unsigned *count,
                               struct sample *samples) {
    OPEN(call, device, SENSOR);
    if (type == NULL || count == NULL || kind > 9)
        return INVALID_ARGUMENT;
    enum key key = kind == 1 ? K_util : kind == 2 ? K_mem_util : kind == 0 ? K_power : K_lost;
    if (key == K_lost || !call.k->given[key] || number_or(&call, K_mig_mode, 0) >= 1)
        return NOT_SUPPORTED;
    *type = UNSIGNED_INT;
    if (samples == NULL) {
        *count = SAMPLES;
        return OK;
    }
    double scale = kind == 0 ? 1000 : 1;
    const struct curve *curve = &call.k->number[key];
    u64 newest = (u64)(call.now * 6);
    unsigned used = 0;
    for (u64 sixth = newest - SAMPLES + 1; sixth <= newest && used < *count; sixth++) {
        double end = (double)sixth / 6 - call.state->epoch, begin = end - 1.0 / 6;
        u64 when = sixth * 1000000 / 6;
        if (begin < 0 || when <= since)
            continue;
        double share = (curve_integral(curve, end) - curve_integral(curve, begin)) * 6 * scale;
        samples[used].microseconds = when;
        samples[used++].value.natural = (unsigned)(share + 0.5);
    }
    *count = used;
    return used == 0 ? NOT_FOUND : OK;
}
