/* Events: XID errors and others, as the state file lists them. */
#include <pthread.h>
#include <stdlib.h>

#include "sim.h"

#define SUPPORTED_TYPES 0x9FULL /* ECC, P-state, XID, clock, power source */

struct event_set { /* what one waiter wants, and how far it has read each GPU */
    pthread_mutex_t lock;
    u64 types[GPU_MAX];
    u64 seen[GPU_MAX];
    unsigned generation;
};

struct event_data {
    handle_t device;
    u64 type, data;
    unsigned gi, ci;
};

API ret_t nvmlEventSetCreate(struct event_set **set) {
    OPEN(call, NULL, SYSTEM);
    if (set == NULL)
        return INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    if (*set == NULL)
        return MEMORY;
    pthread_mutex_init(&(*set)->lock, NULL);
    (*set)->generation = call.state->generation;
    return OK;
}

API ret_t nvmlEventSetFree(struct event_set *set) {
    OPEN(call, NULL, SYSTEM);
    if (set == NULL)
        return INVALID_ARGUMENT;
    pthread_mutex_destroy(&set->lock);
    free(set);
    return OK;
}

API ret_t nvmlDeviceGetSupportedEventTypes(handle_t device, u64 *types) {
    OPEN(call, device, GPU_ONLY);
    if (types == NULL)
        return INVALID_ARGUMENT;
    *types = SUPPORTED_TYPES;
    return OK;
}

/* Only what happens after the registration is delivered. */
API ret_t nvmlDeviceRegisterEvents(handle_t device, u64 types, struct event_set *set) {
    OPEN(call, device, GPU_ONLY);
    if (set == NULL)
        return INVALID_ARGUMENT;
    if ((types & ~SUPPORTED_TYPES) != 0)
        return NOT_SUPPORTED;
    pthread_mutex_lock(&set->lock);
    set->types[call.index] |= types;
    for (unsigned i = 0; i < call.gpu->event_count; i++)
        if (call.gpu->events[i].id > set->seen[call.index])
            set->seen[call.index] = call.gpu->events[i].id;
    pthread_mutex_unlock(&set->lock);
    return OK;
}

static bool next_event(const struct state *state, struct event_set *set, struct event_data *data) {
    bool found = false;
    pthread_mutex_lock(&set->lock);
    for (unsigned gpu = 0; gpu < state->gpus && !found; gpu++) {
        const struct event *next = NULL;
        for (unsigned i = 0; i < state->gpu[gpu]->event_count; i++) {
            const struct event *event = &state->gpu[gpu]->events[i];
            if (event->id > set->seen[gpu] && (event->type & set->types[gpu]) != 0 &&
                (next == NULL || event->id < next->id))
                next = event;
        }
        if (next != NULL) {
            set->seen[gpu] = next->id;
            *data = (struct event_data){handle_of(state, gpu, 0), next->type, next->data, next->gi, next->ci};
            found = true;
        }
    }
    pthread_mutex_unlock(&set->lock);
    return found;
}

static ret_t await(const char *function, struct event_set *set, struct event_data *data, unsigned milliseconds) {
    double end = clock_now() + milliseconds / 1000.0;
    if (set == NULL || data == NULL)
        return INVALID_ARGUMENT;
    for (bool first = true;; first = false) {
        struct call call __attribute__((cleanup(call_close))) = {0};
        ret_t code = first ? call_open(&call, function, NULL, SYSTEM) : call_again(&call);
        if (code != OK)
            return code;
        if (set->generation != call.state->generation)
            return UNINITIALIZED;
        if (next_event(call.state, set, data))
            return OK;
        double left = end - clock_now();
        if (left <= 0)
            return TIMEOUT;
        sleep_seconds(left < 0.01 ? left : 0.01);
    }
}

API ret_t nvmlEventSetWait(struct event_set *set, struct event_data *data, unsigned milliseconds) {
    return await(__func__, set, data, milliseconds);
}

API ret_t nvmlEventSetWait_v2(struct event_set *set, struct event_data *data, unsigned milliseconds) {
    return await(__func__, set, data, milliseconds);
}
