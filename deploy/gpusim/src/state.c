/* Reads a state file (README.md) into memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static const char *const texts[] = {"name", "uuid", "serial", "bus_id", "pci_id", "pci_subsystem"};

/* The array with room for one more, which is zeroed; in steps of 16, so that thousands cost few copies. */
static void *grown(void *array, unsigned count, size_t size) {
    if (count % 16 != 0)
        return array;
    array = realloc(array, (count + 16) * size);
    if (array == NULL)
        abort();
    memset((char *)array + count * size, 0, 16 * size);
    return array;
}
#define ADD(array, count) ((array) = grown(array, count, sizeof *(array)), &(array)[(count)++])

/* FUNCTION AMOUNT GPU */
static bool read_fault(struct state *state, bool stuck, const char *rest) {
    char gpu[16];
    struct fault *fault = ADD(state->faults, state->fault_count);
    if (sscanf(rest, "%95s %lf %15s", fault->function, &fault->amount, gpu) != 3)
        return false;
    fault->stuck = stuck;
    fault->gpu = strcmp(gpu, "*") == 0 ? -1 : atoi(gpu);
    return true;
}

/* PID TYPE memory=CURVE sm=CURVE ... gi=N ci=N ghost=1 */
static bool read_process(struct gpu *gpu, char *rest) {
    struct process *process = ADD(gpu->processes, gpu->process_count);
    const struct {
        const char *name;
        struct curve *curve;
    } curves[] = {{"memory", &process->memory}, {"sm", &process->sm}, {"mem", &process->mem}};
    process->gi = process->ci = NO_INSTANCE;
    int read = 0;
    if (sscanf(rest, "%u %c %n", &process->pid, &process->type, &read) != 2 || strchr("CGM", process->type) == NULL)
        return false;
    char *next, *word = strtok_r(rest + read, " ", &next);
    for (; word != NULL; word = strtok_r(NULL, " ", &next)) {
        unsigned ghost;
        bool right = sscanf(word, "gi=%u", &process->gi) == 1 || sscanf(word, "ci=%u", &process->ci) == 1;
        if (sscanf(word, "ghost=%u", &ghost) == 1)
            process->ghost = ghost == 1, right = true;
        for (unsigned i = 0; i < COUNT(curves) && !right; i++) {
            size_t length = strlen(curves[i].name);
            right = strncmp(word, curves[i].name, length) == 0 && word[length] == '=' &&
                    curve_parse(word + length + 1, curves[i].curve);
        }
        if (!right)
            return false;
    }
    return true;
}

/* ID TYPE DATA */
static bool read_event(struct gpu *gpu, const char *rest) {
    struct event *event = ADD(gpu->events, gpu->event_count);
    return sscanf(rest, "%llu %llu %llu", &event->id, &event->type, &event->data) == 3;
}

static bool read_setting(struct device *device, const char *name, const char *rest) {
    struct setting *setting = ADD(device->settings, device->count);
    bool right = curve_parse(rest, &setting->curve);
    for (unsigned i = 0; i < COUNT(texts) && !right; i++)
        right = strcmp(name, texts[i]) == 0;
    snprintf(setting->name, sizeof setting->name, "%s", name);
    snprintf(setting->text, sizeof setting->text, "%s", rest);
    return right;
}

static bool read_head(struct state *state, const char *name, const char *rest) {
    if (strcmp(name, "fault") == 0 || strcmp(name, "stuck") == 0)
        return read_fault(state, *name == 's', rest);
    if (strcmp(name, "driver") == 0)
        return snprintf(state->driver, TEXT_SIZE, "%s", rest) > 0;
    unsigned *value = strcmp(name, "generation") == 0 ? &state->generation
                      : strcmp(name, "cuda") == 0     ? &state->cuda
                      : strcmp(name, "lost") == 0     ? &state->lost
                                                      : NULL;
    if (strcmp(name, "driver") == 0)
        return snprintf(state->driver, TEXT_SIZE, "%s", rest) > 0;
    return value != NULL ? sscanf(rest, "%u", value) == 1
                         : strcmp(name, "epoch") == 0 && sscanf(rest, "%lf", &state->epoch) == 1;
}

static bool read_line(struct state *state, struct device **current, const char *name, char *rest) {
    struct gpu *gpu = state->gpus > 0 ? state->gpu[state->gpus - 1] : NULL;
    if (strcmp(name, "gpu") == 0 && state->gpus < GPU_MAX) {
        gpu = state->gpu[state->gpus++] = grown(NULL, 0, sizeof *gpu);
        *current = &gpu->self;
        return true;
    }
    if (gpu == NULL)
        return read_head(state, name, rest);
    if (strcmp(name, "mig") == 0 && gpu->migs < MIG_MAX) {
        *current = &gpu->mig[gpu->migs++];
        return true;
    }
    if (strcmp(name, "process") == 0)
        return read_process(gpu, rest);
    return strcmp(name, "event") == 0 ? read_event(gpu, rest) : read_setting(*current, name, rest);
}

const struct setting *find(const struct device *device, const char *name) {
    const struct setting *setting = device->settings, *end = setting + device->count;
    while (setting < end && strcmp(setting->name, name) != 0)
        setting++;
    return setting < end ? setting : NULL;
}

static struct state *refuse(struct state *state, const char *why, const char *line) {
    fprintf(stderr, "gpusim: the state file %s%s\n", why, line);
    state_free(state);
    return NULL;
}

struct state *state_parse(char *text) {
    struct state *state = grown(NULL, 0, sizeof *state);
    struct device *current = NULL;
    char *next, *line = strtok_r(text, "\n", &next);
    if (line == NULL || strcmp(line, "hpml-gpusim 1") != 0)
        return refuse(state, "does not begin with ", "'hpml-gpusim 1'");
    while ((line = strtok_r(NULL, "\n", &next)) != NULL) {
        line += strspn(line, " ");
        size_t length = strcspn(line, " ");
        char *rest = line + length + (line[length] == ' ');
        line[length] = '\0';
        if (length > 0 && *line != '#' && !read_line(state, &current, line, rest))
            return refuse(state, "has a line that is not understood: ", line);
    }
    return state;
}

void state_free(struct state *state) {
    for (unsigned i = 0; i < state->gpus; i++) {
        struct gpu *gpu = state->gpu[i];
        for (unsigned m = 0; m < gpu->migs; m++)
            free(gpu->mig[m].settings);
        free(gpu->self.settings);
        free(gpu->processes);
        free(gpu->events);
        free(gpu);
    }
    free(state->faults);
    free(state);
}
