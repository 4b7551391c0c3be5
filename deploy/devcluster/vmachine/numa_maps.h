/* Whoever opens /proc/PID/numa_maps gets a copy of its beginning with the recorded policy. */
static size_t policy_word(char *to, size_t size, const record_t *record) {
    static const char *words[] = {"default", "prefer", "bind", "interleave", "local",
                                  "prefer (many)", "weighted interleave"};
    int plain = record->mode & ~MODE_FLAGS;
    if (plain < DEFAULT || plain > WEIGHTED_INTERLEAVE) plain = DEFAULT;
    size_t used = (size_t)snprintf(to, size, "%s", words[plain]);
    if (plain == DEFAULT || plain == LOCAL) return used;
    used += (size_t)snprintf(to + used, size - used, ":");
    return used + put_list(to + used, size - used, &record->domains, VIRTUAL_DOMAINS);
}

static int ends_with(const char *path, const char *name) {
    size_t length = strlen(path), own = strlen(name);
    return length > own && path[length - own - 1] == '/' && strcmp(path + length - own, name) == 0;
}

/* Returns the descriptor, or in its place one of a copy that shows the policy. */
static int maps_shown(int file, const char *path) {
    struct statfs system;
    if (file < 0 || fstatfs(file, &system) < 0 || system.f_type != 0x9fa0) return file; /* procfs */
    int error = errno;
    char text[STATUS_MAX], copy[2 * STATUS_MAX], word[512];
    record_t record;
    const char *after = strncmp(path, "/proc/", 6) == 0 ? path + 6 : "";
    if (*after >= '0' && *after <= '9') {
        if (!find((pid_t)strtol(after, NULL, 10), &record)) goto keep;
    } else {
        find_own(&record);
    }
    ssize_t size = pread(file, text, sizeof text - 1, 0);
    if (size <= 0) goto keep;
    text[size] = 0;
    size_t used = 0, length = policy_word(word, sizeof word, &record);
    /* Lines that are whole; those with a policy of their own stay as they are. */
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        char *space = memchr(line, ' ', (size_t)(end - line));
        size_t all = (size_t)(end + 1 - line);
        if (used + all + length > sizeof copy) break;
        if (space && strncmp(space + 1, "default", 7) == 0) {
            memcpy(copy + used, line, (size_t)(space + 1 - line));
            used += (size_t)(space + 1 - line);
            memcpy(copy + used, word, length);
            used += length;
            line = space + 8;
            all = (size_t)(end + 1 - line);
        }
        memcpy(copy + used, line, all);
        used += all;
    }
    put_in_place(file, "numa_maps", copy, used);
keep:
    errno = error;
    return file;
}
