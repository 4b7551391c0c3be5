/* Reads a state file (STATE.md) into memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define KEY_NAME(name) #name,
#define KEY_NAME_AND_BASE(name) #name, #name "_base",
static const char *const key_names[] = {NUMBER_KEYS(KEY_NAME) TOTAL_KEYS(KEY_NAME_AND_BASE)};
static const char *const text_names[] = {TEXT_KEYS(KEY_NAME)};

static int place(const char *name, const char *const *names, int count) {
    for (int i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0)
            return i;
    return -1;
}

static void keep_text(char *into, const char *text) {
    snprintf(into, TEXT_SIZE, "%s", text);
}

static void *grown(void *array, unsigned count, size_t size) {
    /* in steps of 16, so that thousands of processes cost few copies */
    if (count % 16 != 0)
        return array;
    void *larger = realloc(array, (count + 16) * size);
    if (larger == NULL)
        abort();
    memset((char *)larger + count * size, 0, 16 * size);
    return larger;
}

/* fault FUNCTION CODE GPU | slow FUNCTION MILLISECONDS GPU | stuck FUNCTION SECONDS GPU; GPU: * or index */
static bool read_fault(struct state *state, enum fault_kind kind, const char *rest) {
    char gpu[16];
    struct fault fault = {.kind = kind};
    if (sscanf(rest, "%95s %lf %15s", fault.function, &fault.amount, gpu) != 3)
        return false;
    fault.gpu = strcmp(gpu, "*") == 0 ? -1 : atoi(gpu);
    state->faults = grown(state->faults, state->fault_count, sizeof fault);
    state->faults[state->fault_count++] = fault;
    return true;
}

/* process PID TYPE memory=CURVE sm=CURVE ... gi=N ci=N ghost=1 */
static bool read_process(struct gpu *gpu, char *rest) {
    struct process process = {.gi = NO_INSTANCE, .ci = NO_INSTANCE};
    char *next, *word = strtok_r(rest, " ", &next);
    if (word == NULL)
        return false;
    process.pid = (unsigned)strtoul(word, NULL, 10);
    word = strtok_r(NULL, " ", &next);
    if (word == NULL || strchr("CGM", word[0]) == NULL || word[1] != '\0')
        return false;
    process.type = word[0];
    while ((word = strtok_r(NULL, " ", &next)) != NULL) {
        char *value = strchr(word, '=');
        if (value == NULL)
            return false;
        *value++ = '\0';
        bool right = true;
        if (strcmp(word, "memory") == 0)
            right = curve_parse(value, &process.memory);
        else if (strcmp(word, "sm") == 0)
            right = curve_parse(value, &process.sm);
        else if (strcmp(word, "mem") == 0)
            right = curve_parse(value, &process.mem);
        else if (strcmp(word, "enc") == 0)
            right = curve_parse(value, &process.enc);
        else if (strcmp(word, "dec") == 0)
            right = curve_parse(value, &process.dec);
        else if (strcmp(word, "gi") == 0)
            process.gi = (unsigned)strtoul(value, NULL, 10);
        else if (strcmp(word, "ci") == 0)
            process.ci = (unsigned)strtoul(value, NULL, 10);
        else if (strcmp(word, "ghost") == 0)
            process.ghost = strcmp(value, "1") == 0;
        else
            right = false;
        if (!right)
            return false;
    }
    gpu->processes = grown(gpu->processes, gpu->process_count, sizeof process);
    gpu->processes[gpu->process_count++] = process;
    return true;
}

/* event ID TYPE DATA [GI CI] */
static bool read_event(struct gpu *gpu, const char *rest) {
    struct event event = {.gi = NO_INSTANCE, .ci = NO_INSTANCE};
    int count = sscanf(rest, "%llu %llu %llu %u %u", &event.id, &event.type, &event.data, &event.gi, &event.ci);
    if (count != 3 && count != 5)
        return false;
    gpu->events = grown(gpu->events, gpu->event_count, sizeof event);
    gpu->events[gpu->event_count++] = event;
    return true;
}

static bool read_value(struct values *values, const char *key, const char *rest) {
    int text = place(key, text_names, TEXT_COUNT);
    if (text >= 0) {
        keep_text(values->text[text], rest);
        return true;
    }
    int id = place(key, key_names, KEY_COUNT);
    if (id < 0 || !curve_parse(rest, &values->number[id]))
        return false;
    values->given[id] = true;
    return true;
}

static bool read_head(struct state *state, const char *key, char *rest) {
    if (strcmp(key, "epoch") == 0)
        state->epoch = strtod(rest, NULL);
    else if (strcmp(key, "generation") == 0)
        state->generation = (unsigned)strtoul(rest, NULL, 10);
    else if (strcmp(key, "driver") == 0)
        keep_text(state->driver, rest);
    else if (strcmp(key, "nvml") == 0)
        keep_text(state->nvml, rest);
    else if (strcmp(key, "cuda") == 0)
        state->cuda = atoi(rest);
    else if (strcmp(key, "lost") == 0)
        state->lost = strcmp(rest, "1") == 0;
    else if (strcmp(key, "fault") == 0)
        return read_fault(state, FAULT_CODE, rest);
    else if (strcmp(key, "slow") == 0)
        return read_fault(state, FAULT_SLOW, rest);
    else if (strcmp(key, "stuck") == 0)
        return read_fault(state, FAULT_STUCK, rest);
    else
        return false;
    return true;
}

static void *zeroed(size_t size) {
    void *memory = calloc(1, size);
    if (memory == NULL)
        abort();
    return memory;
}

static bool read_line(struct state *state, struct values **current, const char *key, char *rest) {
    struct gpu *gpu = state->gpus > 0 ? state->gpu[state->gpus - 1] : NULL;
    if (strcmp(key, "gpu") == 0) {
        if (state->gpus == GPU_MAX)
            return false;
        gpu = state->gpu[state->gpus++] = zeroed(sizeof *gpu);
        *current = &gpu->k;
        return true;
    }
    if (gpu == NULL)
        return read_head(state, key, rest);
    if (strcmp(key, "mig") == 0) {
        if (gpu->migs == MIG_MAX)
            return false;
        *current = gpu->mig[gpu->migs++] = zeroed(sizeof **current);
        return true;
    }
    if (strcmp(key, "process") == 0)
        return read_process(gpu, rest);
    if (strcmp(key, "event") == 0)
        return read_event(gpu, rest);
    return read_value(*current, key, rest);
}

struct state *state_parse(char *text) {
    struct state *state = zeroed(sizeof *state);
    struct values *current = NULL;
    char *next, *line = strtok_r(text, "\n", &next);
    if (line == NULL || strcmp(line, "hpml-gpusim 1") != 0) {
        fprintf(stderr, "gpusim: the state file does not begin with 'hpml-gpusim 1'\n");
        state_free(state);
        return NULL;
    }
    while ((line = strtok_r(NULL, "\n", &next)) != NULL) {
        line += strspn(line, " ");
        if (*line == '\0' || *line == '#')
            continue;
        char *rest = strchr(line, ' ');
        if (rest == NULL)
            rest = line + strlen(line);
        else
            *rest++ = '\0';
        if (!read_line(state, &current, line, rest)) {
            fprintf(stderr, "gpusim: the state file has a line that is not understood: %s ...\n", line);
            state_free(state);
            return NULL;
        }
    }
    return state;
}

void state_free(struct state *state) {
    for (unsigned i = 0; i < state->gpus; i++) {
        struct gpu *gpu = state->gpu[i];
        for (unsigned m = 0; m < gpu->migs; m++)
            free(gpu->mig[m]);
        free(gpu->processes);
        free(gpu->events);
        free(gpu);
    }
    free(state->faults);
    free(state);
}
