/* Field values: many figures of one device in one call; and the older calls for the same figures. */
#include <math.h>
#include <stdio.h>

#include "sim.h"

enum value_type { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3 };

struct field_value { /* nvmlFieldValue_t */
    unsigned field, scope;
    long long timestamp, latency; /* microseconds */
    int type;
    ret_t code;
    union {
        unsigned natural;
        u64 count;
    } value;
};

/* How a field comes from the state. Of a LINK the scope is its number, or NO_INSTANCE for all together. */
enum source { VALUE, TOTAL, MEAN, ECC, LINK_VALUE, LINK_TOTAL, LINK_SPEED, LINK_STATE, LINKS_VALUE };
static const struct rule {
    unsigned field;
    enum source source;
    const char *key;
    double scale;
    enum value_type type;
} rules[] = {
#define WORD(field, key, scale) {field, VALUE, key, scale, UNSIGNED_INT}
#define LONG(field, source, key, scale) {field, source, key, scale, UNSIGNED_LONG_LONG}
    WORD(1, "ecc_mode", 1), WORD(2, "ecc_mode", 1), WORD(82, "mem_temp", 1), WORD(94, "pcie_replay", 1),
    WORD(90, "nvlink_speed", 1), WORD(91, "nvlink_links", 1),
    WORD(142, "remapped_cor", 1), WORD(143, "remapped_unc", 1),
    WORD(144, "remapped_pending", 1), WORD(145, "remapped_failure", 1),
    {185, MEAN, "power", 1000, UNSIGNED_INT}, WORD(186, "power", 1000), WORD(187, "power_min", 1000),
    WORD(188, "power_max", 1000), WORD(189, "power_default", 1000), WORD(190, "power_enforced", 1000),
    WORD(192, "power_limit", 1000), LONG(83, TOTAL, "power", 1000),
    LONG(3, ECC, "ecc_vol_cor", 1), LONG(4, ECC, "ecc_vol_unc", 1),
    LONG(5, ECC, "ecc_agg_cor", 1), LONG(6, ECC, "ecc_agg_unc", 1),
    LONG(29, VALUE, "retired_sbe", 1), LONG(30, VALUE, "retired_dbe", 1), LONG(31, VALUE, "retired_pending", 1),
    LONG(197, TOTAL, "pcie_tx", 1), LONG(198, TOTAL, "pcie_rx", 1),
    /* time below a limit in nanoseconds; 75 is that of software and hardware */
    LONG(74, TOTAL, "throttle_sw_power", 1e9), LONG(75, TOTAL, "throttle_sw_thermal", 1e9),
    LONG(76, TOTAL, "throttle_sync_boost", 1e9), LONG(77, TOTAL, "throttle_board_limit", 1e9),
    LONG(78, TOTAL, "throttle_low_util", 1e9), LONG(79, TOTAL, "throttle_reliability", 1e9),
    LONG(80, TOTAL, "throttle_app_clocks", 1e9), LONG(81, TOTAL, "throttle_base_clocks", 1e9),
    LONG(269, TOTAL, "throttle_sw_thermal", 1e9), LONG(270, TOTAL, "throttle_hw_thermal", 1e9),
    LONG(271, TOTAL, "throttle_hw_power_brake", 1e9),
    /* data of links in KiB, alone and with the protocol; in bytes with Blackwell and later; errors; speed and state */
    LONG(138, LINK_TOTAL, "nvlink_tx", 1.0 / 1024), LONG(139, LINK_TOTAL, "nvlink_rx", 1.0 / 1024),
    LONG(140, LINK_TOTAL, "nvlink_tx", 1.0 / 1024), LONG(141, LINK_TOTAL, "nvlink_rx", 1.0 / 1024),
    LONG(202, LINK_TOTAL, "nvlink_tx", 1), LONG(204, LINK_TOTAL, "nvlink_rx", 1),
    LONG(38, LINKS_VALUE, "nvlink_crc", 1), LONG(163, LINK_VALUE, "nvlink_crc", 1),
    LONG(52, LINKS_VALUE, "nvlink_replay", 1), LONG(161, LINK_VALUE, "nvlink_replay", 1),
    LONG(59, LINKS_VALUE, "nvlink_recovery", 1), LONG(162, LINK_VALUE, "nvlink_recovery", 1),
    {164, LINK_SPEED, "nvlink_speed", 1, UNSIGNED_INT}, {165, LINK_STATE, "nvlink_links", 1, UNSIGNED_INT},
};

static ret_t by_rule(const struct call *call, const struct rule *rule, unsigned link, double *value) {
    enum source source = rule->source;
    double links = number_or(call, "nvlink_links", 0), hardware = 0;
    if (call->is_mig || (source == ECC && number_or(call, "ecc_mode", 0) < 1) || (source >= LINK_VALUE && links == 0) ||
        ((rule->field == 202 || rule->field == 204) && number_or(call, "nvlink_counts", 0) < 1))
        return NOT_SUPPORTED;
    if (source >= LINK_VALUE && source != LINKS_VALUE && link != NO_INSTANCE && link >= links)
        return INVALID_ARGUMENT;
    bool known = source == MEAN                            ? mean(call, rule->key, 1, value)
                 : source == TOTAL || source == LINK_TOTAL ? total(call, rule->key, value)
                                                           : number(call, rule->key, value);
    if (rule->field == 75 && total(call, "throttle_hw_thermal", &hardware))
        *value += hardware;
    if (source == LINKS_VALUE || (link == NO_INSTANCE && (source == LINK_VALUE || source == LINK_TOTAL)))
        *value *= links;
    *value = source == LINK_STATE ? 1 : *value * rule->scale;
    return known ? OK : NOT_SUPPORTED;
}

static void fill(const struct call *call, struct field_value *field) {
    char name[32];
    double value = 0;
    const struct rule *rule = rules;
    while (rule < rules + COUNT(rules) && rule->field != field->field)
        rule++;
    snprintf(name, sizeof name, "field:%u", field->field);
    field->timestamp = (long long)(call->now * 1e6);
    field->latency = 0;
    field->code = fault_code(call, name, (int)call->index);
    if (field->code == OK)
        field->code = rule == rules + COUNT(rules) ? NOT_SUPPORTED : by_rule(call, rule, field->scope, &value);
    if (field->code != OK)
        return;
    field->type = rule->type;
    if ((field->field == 197 || field->field == 198) && number_or(call, "pcie_bits", 32) == 32) {
        value = fmod(value, 4294967296.0);
        field->type = UNSIGNED_INT;
    }
    if (field->type == UNSIGNED_INT)
        field->value.natural = (unsigned)(value + 0.5 < 4294967296.0 ? value + 0.5 : value);
    else
        field->value.count = (u64)value;
}

API ret_t nvmlDeviceGetFieldValues(handle_t device, int count, struct field_value *fields) {
    OPEN(call, device, ANY_DEVICE);
    for (int i = 0; i < count; i++)
        fill(&call, &fields[i]);
    return count > 0 ? OK : INVALID_ARGUMENT;
}

struct violation {
    u64 reference, nanoseconds; /* reference: microseconds since 1970 */
};

API ret_t nvmlDeviceGetViolationStatus(handle_t device, unsigned policy, struct violation *violation) {
    OPEN(call, device, SENSOR);
    if (policy > 11 || (policy > 5 && policy < 10))
        return INVALID_ARGUMENT;
    struct field_value field = {.field = policy < 6 ? 74 + policy : 70 + policy};
    fill(&call, &field);
    *violation = (struct violation){(u64)(call.now * 1e6), field.value.count};
    return field.code;
}

/* The driver counts bytes for 20 ms, and the call lasts as long. */
API ret_t nvmlDeviceGetPcieThroughput(handle_t device, unsigned counter, unsigned *kibibytes) {
    OPEN(call, device, SENSOR);
    double bytes = 0;
    if (counter > 1)
        return INVALID_ARGUMENT;
    sleep_seconds(0.02);
    call.t += 0.02;
    bool known = mean(&call, counter == 0 ? "pcie_tx" : "pcie_rx", 0.02, &bytes);
    *kibibytes = (unsigned)(bytes / 1024 + 0.5);
    return known ? OK : NOT_SUPPORTED;
}

static ret_t of_link(const struct call *call, unsigned link, const char *name, unsigned *value) {
    double links = number_or(call, "nvlink_links", 0);
    if (links > 0 && link >= links)
        return INVALID_ARGUMENT;
    return links == 0 ? NOT_SUPPORTED : number_unsigned(call, name, 1, value);
}

API ret_t nvmlDeviceGetNvLinkState(handle_t device, unsigned link, unsigned *active) {
    OPEN(call, device, SENSOR);
    ret_t code = of_link(&call, link, "nvlink_links", active);
    *active = 1;
    return code;
}

API ret_t nvmlDeviceGetNvLinkVersion(handle_t device, unsigned link, unsigned *version) {
    OPEN(call, device, SENSOR);
    return of_link(&call, link, "nvlink_version", version);
}

API ret_t nvmlDeviceGetNvLinkErrorCounter(handle_t device, unsigned link, unsigned counter, u64 *errors) {
    OPEN(call, device, SENSOR);
    static const char *const keys[] = {"nvlink_replay", "nvlink_recovery", "nvlink_crc", "", ""};
    unsigned count = 0;
    ret_t code = counter < COUNT(keys) ? of_link(&call, link, keys[counter], &count) : INVALID_ARGUMENT;
    *errors = count;
    return code;
}

struct sample {
    u64 microseconds, value;
};

#define SAMPLES 120 /* at six a second: the driver keeps the last 20 seconds */

/* Power (0), utilization (1) and memory utilization (2): the mean of each sixth of a second. */
API ret_t nvmlDeviceGetSamples(handle_t device, unsigned kind, u64 since, unsigned *type, unsigned *count,
                               struct sample *samples) {
    OPEN(call, device, SENSOR);
    static const char *const keys[] = {"power", "util", "mem_util"};
    const struct setting *setting = kind < COUNT(keys) ? find(call.device, keys[kind]) : NULL;
    if (setting == NULL || number_or(&call, "mig_mode", 0) >= 1)
        return kind > 9 ? INVALID_ARGUMENT : NOT_SUPPORTED;
    unsigned used = 0, room = samples == NULL ? 0 : *count;
    u64 newest = (u64)(call.now * 6);
    for (u64 sixth = newest - SAMPLES + 1; sixth <= newest && used < room; sixth++) {
        double end = (double)sixth / 6 - call.state->epoch, begin = end - 1.0 / 6;
        u64 when = sixth * 1000000 / 6;
        if (begin < 0 || when <= since)
            continue;
        double share = (curve_integral(&setting->curve, end) - curve_integral(&setting->curve, begin)) * 6;
        samples[used++] = (struct sample){when, (u64)(share * (kind == 0 ? 1000 : 1) + 0.5)};
    }
    *type = UNSIGNED_INT;
    *count = samples == NULL ? SAMPLES : used;
    return *count == 0 ? NOT_FOUND : OK;
}
