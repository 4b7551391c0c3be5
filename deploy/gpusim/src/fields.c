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

/* How a field comes from the state: of a LINK the scope is its number, or NO_INSTANCE for all together;
   LINKS_VALUE is of all links, whatever the scope. */
enum source { VALUE, TOTAL, ECC, LINK_TOTAL, LINK_VALUE, LINKS_VALUE };
static const struct rule {
    unsigned field;
    enum source source;
    const char *key;
    double scale;
    enum value_type type;
} rules[] = {
#define WORD(field, key, scale) {field, VALUE, key, scale, UNSIGNED_INT}
#define LONG(field, source, key, scale) {field, source, key, scale, UNSIGNED_LONG_LONG}
    WORD(82, "mem_temp", 1), WORD(91, "nvlink_links", 1), WORD(94, "pcie_replay", 1),
    WORD(230, "recovery_action", 1),
    WORD(142, "remapped_cor", 1), WORD(143, "remapped_unc", 1),
    WORD(144, "remapped_pending", 1), WORD(145, "remapped_failure", 1),
    WORD(186, "power", 1000), LONG(83, TOTAL, "power", 1000),
    LONG(3, ECC, "ecc_vol_cor", 1), LONG(4, ECC, "ecc_vol_unc", 1),
    LONG(5, ECC, "ecc_agg_cor", 1), LONG(6, ECC, "ecc_agg_unc", 1),
    LONG(29, VALUE, "retired_sbe", 1), LONG(30, VALUE, "retired_dbe", 1), LONG(31, VALUE, "retired_pending", 1),
    LONG(197, TOTAL, "pcie_tx", 1), LONG(198, TOTAL, "pcie_rx", 1),
    /* bytes of links in KiB, without and with the protocol; errors; state */
    LONG(138, LINK_TOTAL, "nvlink_tx", 1.0 / 1024), LONG(139, LINK_TOTAL, "nvlink_rx", 1.0 / 1024),
    LONG(140, LINK_TOTAL, "nvlink_tx", 1.0 / 1024), LONG(141, LINK_TOTAL, "nvlink_rx", 1.0 / 1024),
    LONG(38, LINKS_VALUE, "nvlink_crc", 1), LONG(52, LINKS_VALUE, "nvlink_replay", 1),
    LONG(59, LINKS_VALUE, "nvlink_recovery", 1), {165, LINK_VALUE, "nvlink_state", 1, UNSIGNED_INT},
    LONG(163, LINK_VALUE, "nvlink_crc", 1), LONG(161, LINK_VALUE, "nvlink_replay", 1),
    LONG(162, LINK_VALUE, "nvlink_recovery", 1),
#define BLACKWELL(field) LONG(field, LINK_VALUE, "nvlink_field" #field, 1)
    BLACKWELL(206), BLACKWELL(207), BLACKWELL(208), BLACKWELL(209), BLACKWELL(210), BLACKWELL(211),
    BLACKWELL(212), BLACKWELL(214), BLACKWELL(215), BLACKWELL(219), BLACKWELL(221),
};

static ret_t by_rule(const struct call *call, const struct rule *rule, unsigned link, double *value) {
    enum source source = rule->source;
    double links = number_or(call, "nvlink_links", 0);
    if (call->is_mig || (source == ECC && number_or(call, "ecc_mode", 0) < 1) || (source >= LINK_TOTAL && links == 0))
        return NOT_SUPPORTED;
    if ((source == LINK_TOTAL || source == LINK_VALUE) && link != NO_INSTANCE && link >= links)
        return INVALID_ARGUMENT;
    bool counts = source == TOTAL || source == LINK_TOTAL;
    bool known = counts ? total(call, rule->key, value) : number(call, rule->key, value);
    if (source == LINKS_VALUE || (link == NO_INSTANCE && source == LINK_TOTAL))
        *value *= links;
    *value *= rule->scale;
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
    snprintf(name, sizeof name, "field:%u:%u", field->field, field->scope); /* of a single link */
    if (field->code == OK)
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

/* The driver counts bytes for 20 ms, and the call lasts as long. */
API ret_t nvmlDeviceGetPcieThroughput(handle_t device, unsigned counter, unsigned *kibibytes) {
    OPEN(call, device, SENSOR);
    if (counter > 1)
        return INVALID_ARGUMENT;
    sleep_seconds(0.02);
    return number_unsigned(&call, counter == 0 ? "pcie_tx" : "pcie_rx", 1.0 / 1024, kibibytes);
}
