/* Events: XID errors and others, as the state file lists them. */
#include <pthread.h>
#include <stdlib.h>

#include "sim.h"

#define SUPPORTED_TYPES 0x9FULL /* ECC, P-state, XID, clock, power source */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all sets */

struct event_set { /* what one waiter wants, and how far it has read each GPU */
    u64 types[GPU_MAX], seen[GPU_MAX];
    unsigned generation;
};

struct event_data {
    handle_t device;
    u64 type, data;
    unsigned gi, ci;
};

API ret_t nvmlEventSetCreate(struct event_set **set) {
    OPEN(call, NULL, SYSTEM);
    *set = calloc(1, sizeof **set);
    (*set)->generation = call.state->generation;
    return OK;
}

API ret_t nvmlEventSetFree(struct event_set *set) {
    OPEN(call, NULL, SYSTEM);
    free(set);
    return OK;
}

/* The oldest event of a GPU that a set has not seen, of some types; NULL where there is none. */
static const struct event *next_event(const struct gpu *gpu, u64 seen, u64 types) {
    const struct event *next = NULL;
    for (const struct event *event = gpu->events; event < gpu->events + gpu->event_count; event++)
        if (event->id > seen && (event->type & types) != 0 && (next == NULL || event->id < next->id))
            next = event;
    return next;
}

/* Only what happens after the registration is delivered. */
API ret_t nvmlDeviceRegisterEvents(handle_t device, u64 types, struct event_set *set) {
    OPEN(call, device, GPU_ONLY);
    if ((types & ~SUPPORTED_TYPES) != 0)
        return NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    set->types[call.index] |= types;
    for (const struct event *event; (event = next_event(call.gpu, set->seen[call.index], ~0ULL)) != NULL;)
        set->seen[call.index] = event->id;
    pthread_mutex_unlock(&lock);
    return OK;
}

static bool deliver(const struct state *state, struct event_set *set, struct event_data *data) {
    const struct event *next = NULL;
    pthread_mutex_lock(&lock);
    for (unsigned gpu = 0; gpu < state->gpus && next == NULL; gpu++) {
        next = next_event(state->gpu[gpu], set->seen[gpu], set->types[gpu]);
        if (next != NULL) {
            set->seen[gpu] = next->id;
            *data = (struct event_data){handle_of(state, gpu, 0), next->type, next->data, NO_INSTANCE, NO_INSTANCE};
        }
    }
    pthread_mutex_unlock(&lock);
    return next != NULL;
}

API ret_t nvmlEventSetWait_v2(struct event_set *set, struct event_data *data, unsigned milliseconds) {
    double end = clock_now() + milliseconds / 1000.0;
    for (bool first = true;; first = false) {
        struct call call __attribute__((cleanup(call_close))) = {0};
        ret_t code = first ? call_open(&call, __func__, NULL, SYSTEM) : call_again(&call);
        if (code != OK)
            return code;
        if (set->generation != call.state->generation)
            return UNINITIALIZED;
        if (deliver(call.state, set, data))
            return OK;
        double left = end - clock_now();
        if (left <= 0)
            return TIMEOUT;
        sleep_seconds(left < 0.01 ? left : 0.01);
    }
}
ALIAS(nvmlEventSetWait, nvmlEventSetWait_v2)
