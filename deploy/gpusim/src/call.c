/* The newest state, calls of the library, handles, faults. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct state *newest;
static struct stat newest_file;
static int starts;           /* nvmlInit calls less nvmlShutdown calls */
static unsigned attached_to; /* the generation of the driver at the last nvmlInit */

double clock_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void sleep_seconds(double seconds) {
    if (seconds <= 0)
        return;
    struct timespec left = {.tv_sec = (time_t)seconds};
    left.tv_nsec = (long)((seconds - (double)left.tv_sec) * 1e9);
    while (nanosleep(&left, &left) == -1 && errno == EINTR)
        ;
}

static char *read_whole(const char *path, struct stat *file) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor == -1)
        return NULL;
    char *text = NULL;
    if (fstat(descriptor, file) == 0 && (text = malloc((size_t)file->st_size + 1)) != NULL) {
        size_t length = 0;
        ssize_t got;
        while (length < (size_t)file->st_size &&
               (got = read(descriptor, text + length, (size_t)file->st_size - length)) > 0)
            length += (size_t)got;
        text[length] = '\0';
    }
    close(descriptor);
    return text;
}

static bool same_file(const struct stat *one, const struct stat *other) {
    return one->st_ino == other->st_ino && one->st_size == other->st_size &&
           one->st_mtim.tv_sec == other->st_mtim.tv_sec && one->st_mtim.tv_nsec == other->st_mtim.tv_nsec;
}

static void drop(struct state *state) { /* with the lock held */
    if (state != NULL && --state->users == 0)
        state_free(state);
}

static void refresh(void) { /* with the lock held */
    const char *path = getenv("HPML_GPUSIM");
    struct stat file;
    if (path == NULL || stat(path, &file) != 0) {
        drop(newest);
        newest = NULL;
        return;
    }
    if (newest != NULL && same_file(&file, &newest_file))
        return;
    char *text = read_whole(path, &file);
    struct state *state = text == NULL ? NULL : state_parse(text);
    free(text);
    drop(newest);
    newest = state;
    if (state != NULL) {
        state->users = 1;
        newest_file = file;
    }
}

struct state *state_use(void) {
    pthread_mutex_lock(&lock);
    refresh();
    struct state *state = newest;
    if (state != NULL)
        state->users++;
    pthread_mutex_unlock(&lock);
    return state;
}

void state_leave(struct state *state) {
    pthread_mutex_lock(&lock);
    drop(state);
    pthread_mutex_unlock(&lock);
}

/* Tests that count calls name a file in HPML_GPUSIM_CALLS: one line per call. */
static void note(const char *function) {
    const char *path = getenv("HPML_GPUSIM_CALLS");
    if (path == NULL)
        return;
    int descriptor = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor == -1)
        return;
    char line[TEXT_SIZE + 1];
    size_t length = strnlen(function, TEXT_SIZE - 1);
    memcpy(line, function, length);
    line[length++] = '\n';
    if (write(descriptor, line, length) == -1)
        errno = 0; /* a full disk is no fault of the caller's */
    close(descriptor);
}

static const struct fault *find_fault(const struct state *state, enum fault_kind kind, const char *name, int gpu) {
    for (unsigned i = 0; i < state->fault_count; i++) {
        const struct fault *fault = &state->faults[i];
        if (fault->kind == kind && (fault->gpu == -1 || fault->gpu == gpu) &&
            fnmatch(fault->function, name, 0) == 0)
            return fault;
    }
    return NULL;
}

/* Waits as long as the fault says, and no longer than the newest state has it. */
static void stay_stuck(const char *function, int gpu, double seconds) {
    double end = clock_now() + seconds;
    while (clock_now() < end) {
        sleep_seconds(0.02);
        struct state *state = state_use();
        bool on = state != NULL && find_fault(state, FAULT_STUCK, function, gpu) != NULL;
        if (state != NULL)
            state_leave(state);
        if (!on)
            return;
    }
}

/* Takes the time that a fault makes a call take. */
static void linger(const struct state *state, const char *function, int gpu) {
    const struct fault *fault = find_fault(state, FAULT_STUCK, function, gpu);
    if (fault != NULL)
        stay_stuck(function, gpu, fault->amount);
    fault = find_fault(state, FAULT_SLOW, function, gpu);
    if (fault != NULL)
        sleep_seconds(fault->amount / 1000);
}

#define HANDLE_TAG 0x6e766d6cULL /* "nvml" in the upper half of every handle */

handle_t handle_of(const struct state *state, unsigned gpu, unsigned mig) {
    uintptr_t value = HANDLE_TAG << 32 | (uintptr_t)(state->generation & 0xFFFF) << 16 | (gpu + 1) << 8 | mig;
    return (handle_t)value;
}

static ret_t handle_open(struct call *call, handle_t device) {
    uintptr_t value = (uintptr_t)device;
    unsigned gpu = value >> 8 & 0xFF, mig = value & 0xFF;
    if (value >> 32 != HANDLE_TAG || (value >> 16 & 0xFFFF) != (call->state->generation & 0xFFFF))
        return INVALID_ARGUMENT;
    if (gpu == 0 || gpu > call->state->gpus || mig > call->state->gpu[gpu - 1]->migs)
        return INVALID_ARGUMENT;
    call->index = gpu - 1;
    call->gpu = call->state->gpu[gpu - 1];
    call->mig = mig == 0 ? NULL : call->gpu->mig[mig - 1];
    call->k = call->mig == NULL ? &call->gpu->k : call->mig;
    return OK;
}

ret_t handle_check(const struct call *call, unsigned gpu) {
    const struct values *k = &call->state->gpu[gpu]->k;
    bool lost = call->state->lost || (k->given[K_lost] && curve_value(&k->number[K_lost], call->t) >= 1);
    return lost ? GPU_IS_LOST : OK;
}

ret_t fault_code(const struct call *call, const char *name) {
    const struct fault *fault =
        find_fault(call->state, FAULT_CODE, name, call->gpu == NULL ? -1 : (int)call->index);
    return fault == NULL ? OK : (ret_t)fault->amount;
}

static ret_t check(struct call *call, const char *function, handle_t device, enum scope scope) {
    ret_t handled = scope == SYSTEM ? OK : handle_open(call, device);
    linger(call->state, function, call->gpu == NULL ? -1 : (int)call->index);
    ret_t code = fault_code(call, function);
    if (code != OK)
        return code;
    if (handled != OK || scope == SYSTEM)
        return handled;
    if (handle_check(call, call->index) != OK)
        return GPU_IS_LOST;
    if (call->mig != NULL && scope == GPU_ONLY)
        return INVALID_ARGUMENT;
    if (call->mig != NULL && scope == SENSOR)
        return NOT_SUPPORTED;
    return OK;
}

ret_t call_again(struct call *call) {
    call->state = state_use();
    if (call->state == NULL || !initialized(call->state->generation))
        return UNINITIALIZED;
    call->now = clock_now();
    call->t = call->now > call->state->epoch ? call->now - call->state->epoch : 0;
    return OK;
}

ret_t call_open(struct call *call, const char *function, handle_t device, enum scope scope) {
    note(function);
    ret_t code = call_again(call);
    return code != OK ? code : check(call, function, device, scope);
}

void call_close(struct call *call) {
    if (call->state != NULL)
        state_leave(call->state);
}

bool initialized(unsigned generation) {
    pthread_mutex_lock(&lock);
    bool yes = starts > 0 && attached_to == generation;
    pthread_mutex_unlock(&lock);
    return yes;
}

static ret_t start(const char *function) {
    struct call call __attribute__((cleanup(call_close))) = {0};
    note(function);
    call.state = state_use();
    if (call.state == NULL)
        return DRIVER_NOT_LOADED;
    linger(call.state, function, -1);
    ret_t code = fault_code(&call, function);
    if (code != OK)
        return code;
    pthread_mutex_lock(&lock);
    starts++;
    attached_to = call.state->generation;
    pthread_mutex_unlock(&lock);
    return OK;
}

API ret_t nvmlInit(void) {
    return start("nvmlInit");
}

API ret_t nvmlInit_v2(void) {
    return start("nvmlInit_v2");
}

API ret_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return start("nvmlInitWithFlags");
}

API ret_t nvmlShutdown(void) {
    struct call call __attribute__((cleanup(call_close))) = {0};
    note("nvmlShutdown");
    call.state = state_use();
    if (call.state != NULL)
        linger(call.state, "nvmlShutdown", -1);
    pthread_mutex_lock(&lock);
    ret_t code = starts > 0 ? OK : UNINITIALIZED;
    if (starts > 0)
        starts--;
    pthread_mutex_unlock(&lock);
    return code;
}
