/* Memory policies, kept and told; they have no effect on where memory is. */
enum { DEFAULT, PREFERRED, BIND, INTERLEAVE, LOCAL, PREFERRED_MANY, WEIGHTED_INTERLEAVE };
enum { MODE_FLAGS = 0xe000, GET_NODE = 1, GET_ADDRESS = 2, GET_ALLOWED = 4 };

static uint64_t domains_in(const unsigned long *mask, unsigned long bits) {
    if (!mask || bits <= 1) return 0;
    bits--; /* the kernel counts so */
    return bits < 64 ? mask[0] & ((1UL << bits) - 1) : mask[0];
}

static int beyond(const unsigned long *mask, unsigned long bits) {
    if (!mask || bits <= 65) return 0;
    for (unsigned long word = 1; word * 64 < bits - 1; word++)
        if (mask[word]) return 1;
    return 0;
}

/* The errors are those that Linux 6.18 was seen to give. */
static int policy_of(int mode, const unsigned long *mask, unsigned long bits, record_t *record) {
    uint64_t asked = domains_in(mask, bits), there = asked & ALL_DOMAINS;
    int plain = mode & ~MODE_FLAGS;
    if (plain < DEFAULT || plain > WEIGHTED_INTERLEAVE) return fail(EINVAL);
    if (plain == DEFAULT || plain == LOCAL) {
        if (asked || beyond(mask, bits)) return fail(EINVAL);
    } else if (!asked && plain == PREFERRED) {
        mode = LOCAL;
    } else if (!there) {
        return fail(EINVAL);
    }
    if (plain == PREFERRED) there &= -there; /* one domain alone */
    record->mode = mode;
    record->domains = there;
    return 0;
}

static int set_policy(int mode, const unsigned long *mask, unsigned long bits) {
    record_t record;
    uint64_t start = find_own(&record);
    if (policy_of(mode, mask, bits, &record) < 0) return -1;
    return start && save(own_tid(), start, &record, 0) ? 0 : fail(ENOMEM);
}

static int get_policy(int *mode, unsigned long *mask, unsigned long bits, long flags) {
    record_t record;
    if (mask && bits < VIRTUAL_DOMAINS) return fail(EINVAL);
    find_own(&record);
    if (mode) *mode = flags & GET_ALLOWED ? 0 : record.mode;
    if (mask) {
        memset(mask, 0, (bits + 62) / 64 * sizeof *mask);
        mask[0] = flags & GET_ALLOWED ? ALL_DOMAINS : record.domains;
    }
    return 0;
}
