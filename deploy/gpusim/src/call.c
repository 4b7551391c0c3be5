/* The newest state, calls of the library, handles, faults. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdio.h>
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
    struct timespec left = {.tv_sec = (time_t)seconds};
    left.tv_nsec = (long)((seconds - (double)left.tv_sec) * 1e9);
    while (nanosleep(&left, &left) == -1 && errno == EINTR)
        ;
}

static char *read_whole(const char *path, struct stat *status) {
    FILE *file = fopen(path, "re");
    char *text = NULL;
    if (file != NULL && fstat(fileno(file), status) == 0 && (text = calloc(1, (size_t)status->st_size + 1)) != NULL)
        (void)!fread(text, 1, (size_t)status->st_size, file);
    if (file != NULL)
        fclose(file);
    return text;
}

static bool same_file(const struct stat *one, const struct stat *other) {
    return one->st_ino == other->st_ino && one->st_size == other->st_size &&
           one->st_mtim.tv_sec == other->st_mtim.tv_sec && one->st_mtim.tv_nsec == other->st_mtim.tv_nsec;
}

static void leave(struct state *state) { /* with the lock held */
    if (state != NULL && --state->users == 0)
        state_free(state);
}

static void refresh(void) { /* with the lock held */
    const char *path = getenv("HPML_GPUSIM");
    if (path == NULL) /* jobs of hpml do not inherit HPML_... */
        path = getenv("GPUSIM");
    struct stat file;
    bool there = path != NULL && stat(path, &file) == 0;
    if (there && newest != NULL && same_file(&file, &newest_file))
        return;
    char *text = there ? read_whole(path, &file) : NULL;
    leave(newest);
    newest = text == NULL ? NULL : state_parse(text);
    free(text);
    if (newest != NULL) {
        newest->users = 1;
        newest_file = file;
    }
}

static struct state *state_use(void) { /* the newest state, or NULL where there is no file */
    pthread_mutex_lock(&lock);
    refresh();
    struct state *state = newest;
    if (state != NULL)
        state->users++;
    pthread_mutex_unlock(&lock);
    return state;
}

void call_close(struct call *call) {
    pthread_mutex_lock(&lock);
    leave(call->state);
    pthread_mutex_unlock(&lock);
}

/* Tests that count calls name a file in HPML_GPUSIM_CALLS: one line per call. */
static void note(const char *function) {
    const char *path = getenv("HPML_GPUSIM_CALLS");
    int descriptor = path == NULL ? -1 : open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor == -1)
        return;
    dprintf(descriptor, "%s\n", function);
    close(descriptor);
}

static const struct fault *find_fault(const struct state *state, bool stuck, const char *name, int gpu) {
    for (unsigned i = 0; state != NULL && i < state->fault_count; i++) {
        const struct fault *fault = &state->faults[i];
        if (fault->stuck == stuck && (fault->gpu == -1 || fault->gpu == gpu) && fnmatch(fault->function, name, 0) == 0)
            return fault;
    }
    return NULL;
}

ret_t fault_code(const struct call *call, const char *name, int gpu) {
    const struct fault *fault = find_fault(call->state, false, name, gpu);
    return fault == NULL ? OK : (ret_t)fault->amount;
}

/* Takes the time that a fault makes a call take, which is no longer than the newest state says. */
static void linger(const struct state *state, const char *function, int gpu) {
    const struct fault *stuck = find_fault(state, true, function, gpu);
    double end = stuck == NULL ? 0 : clock_now() + stuck->amount;
    for (double left; stuck != NULL && (left = end - clock_now()) > 0;) {
        sleep_seconds(left < 0.02 ? left : 0.02);
        struct call newer __attribute__((cleanup(call_close))) = {.state = state_use()};
        stuck = find_fault(newer.state, true, function, gpu);
    }
}

#define HANDLE_TAG 0x6e766d6cULL /* "nvml" in the upper half of every handle */

handle_t handle_of(const struct state *state, unsigned gpu, unsigned mig) {
    uintptr_t value = HANDLE_TAG << 32 | (uintptr_t)(state->generation & 0xFFFF) << 16 | (gpu + 1) << 8 | mig;
    return (handle_t)value;
}

static ret_t handle_open(struct call *call, handle_t handle) {
    uintptr_t value = (uintptr_t)handle;
    unsigned gpu = value >> 8 & 0xFF, mig = value & 0xFF;
    if (value >> 32 != HANDLE_TAG || (value >> 16 & 0xFFFF) != (call->state->generation & 0xFFFF) || gpu == 0 ||
        gpu > call->state->gpus || mig > call->state->gpu[gpu - 1]->migs)
        return INVALID_ARGUMENT;
    call->index = gpu - 1;
    call->gpu = call->state->gpu[gpu - 1];
    call->is_mig = mig > 0;
    call->device = mig > 0 ? &call->gpu->mig[mig - 1] : &call->gpu->self;
    return OK;
}

bool is_lost(const struct call *call, unsigned gpu) {
    const struct setting *lost = find(&call->state->gpu[gpu]->self, "lost");
    return call->state->lost == 1 || (lost != NULL && curve_value(&lost->curve, call->t) >= 1);
}

ret_t call_again(struct call *call) {
    call->state = state_use();
    pthread_mutex_lock(&lock);
    bool initialized = call->state != NULL && starts > 0 && attached_to == call->state->generation;
    pthread_mutex_unlock(&lock);
    if (!initialized)
        return UNINITIALIZED;
    call->now = clock_now();
    call->t = call->now > call->state->epoch ? call->now - call->state->epoch : 0;
    return OK;
}

ret_t call_open(struct call *call, const char *function, handle_t handle, enum scope scope) {
    note(function);
    ret_t code = call_again(call);
    if (code != OK)
        return code;
    ret_t handled = scope == SYSTEM ? OK : handle_open(call, handle);
    int gpu = call->gpu == NULL ? -1 : (int)call->index;
    linger(call->state, function, gpu);
    code = fault_code(call, function, gpu);
    if (code != OK || handled != OK || scope == SYSTEM)
        return code != OK ? code : handled;
    if (is_lost(call, call->index))
        return GPU_IS_LOST;
    if (call->is_mig && scope != ANY_DEVICE)
        return scope == GPU_ONLY ? INVALID_ARGUMENT : NOT_SUPPORTED;
    return OK;
}

API ret_t nvmlInitWithFlags(unsigned flags) {
    struct call call __attribute__((cleanup(call_close))) = {0};
    const char *name = flags == UINT32_MAX ? "nvmlInit_v2" : __func__;
    note(name);
    call.state = state_use();
    if (call.state == NULL)
        return DRIVER_NOT_LOADED;
    linger(call.state, name, -1);
    ret_t code = fault_code(&call, name, -1);
    if (code != OK)
        return code;
    pthread_mutex_lock(&lock);
    starts++;
    attached_to = call.state->generation;
    pthread_mutex_unlock(&lock);
    return OK;
}

API ret_t nvmlInit_v2(void) {
    return nvmlInitWithFlags(UINT32_MAX);
}

API ret_t nvmlShutdown(void) {
    struct call call __attribute__((cleanup(call_close))) = {.state = state_use()};
    note(__func__);
    linger(call.state, __func__, -1);
    pthread_mutex_lock(&lock);
    ret_t code = starts > 0 ? OK : UNINITIALIZED;
    starts -= starts > 0;
    pthread_mutex_unlock(&lock);
    return code;
}
