/* A simulated NVML: what its files share. State comes from the file that HPML_GPUSIM names. */
#ifndef GPUSIM_SIM_H
#define GPUSIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "keys.h"

#define API __attribute__((visibility("default")))
#define TEXT_SIZE 96
#define NO_INSTANCE 0xFFFFFFFFu

typedef int ret_t;       /* nvmlReturn_t */
typedef void *handle_t;  /* nvmlDevice_t: a number in the form of a pointer, never followed */
typedef unsigned long long u64;

enum { /* nvmlReturn_t */
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    MEMORY = 20,
    VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

/* A value as a function of the seconds since the state's epoch. */
enum curve_kind { CONSTANT, SQUARE, SINE, RAMP };
struct curve {
    enum curve_kind kind;
    double p[5];
};
bool curve_parse(const char *text, struct curve *curve);
double curve_value(const struct curve *curve, double t);
double curve_integral(const struct curve *curve, double t); /* from 0 to t */

struct values { /* of a GPU or of a MIG device */
    struct curve number[KEY_COUNT];
    bool given[KEY_COUNT];
    char text[TEXT_COUNT][TEXT_SIZE];
};

struct process {
    unsigned pid;
    char type; /* C compute, G graphics, M client of MPS */
    bool ghost; /* listed although no such process lives */
    unsigned gi, ci;
    struct curve memory, sm, mem, enc, dec;
};

struct event {
    u64 id, type, data;
    unsigned gi, ci;
};

#define MIG_MAX 16
#define GPU_MAX 64

struct gpu {
    struct values k;
    struct values *mig[MIG_MAX];
    unsigned migs;
    struct process *processes;
    unsigned process_count;
    struct event *events;
    unsigned event_count;
};

enum fault_kind { FAULT_CODE, FAULT_SLOW, FAULT_STUCK };
struct fault {
    enum fault_kind kind;
    char function[TEXT_SIZE]; /* a pattern of fnmatch */
    double amount;            /* the code, milliseconds or seconds */
    int gpu;                  /* -1: every one, and calls without a device */
};

struct state {
    int users;
    double epoch;
    unsigned generation;
    bool lost;
    int cuda;
    char driver[TEXT_SIZE], nvml[TEXT_SIZE];
    struct gpu *gpu[GPU_MAX];
    unsigned gpus;
    struct fault *faults;
    unsigned fault_count;
};

struct state *state_parse(char *text); /* NULL: it says what is wrong on standard error */
void state_free(struct state *state);
struct state *state_use(void); /* the newest state, or NULL where there is no file; state_leave it */
void state_leave(struct state *state);

/* One call of the library: the state it sees, when, and of which device. */
struct call {
    struct state *state;
    double now; /* seconds since 1970 */
    double t;   /* seconds since the state's epoch, at least 0 */
    unsigned index;
    struct gpu *gpu;
    struct values *mig; /* NULL unless the handle is a MIG device's */
    struct values *k;   /* of the MIG device, else of the GPU */
};

enum scope { SYSTEM, ANY_DEVICE, GPU_ONLY, SENSOR };
ret_t call_open(struct call *call, const char *function, handle_t device, enum scope scope);
ret_t call_again(struct call *call); /* for a call that waits: the newest state, without faults */
void call_close(struct call *call);
ret_t fault_code(const struct call *call, const char *name); /* of a `fault` for this name, or OK */
handle_t handle_of(const struct state *state, unsigned gpu, unsigned mig); /* mig: 0 none, 1 first */
ret_t handle_check(const struct call *call, unsigned gpu);
bool initialized(unsigned generation);

#define OPEN(name, device, scope) \
    struct call name __attribute__((cleanup(call_close))) = {0}; \
    { \
        ret_t opened = call_open(&name, __func__, device, scope); \
        if (opened != OK) \
            return opened; \
    }

/* A number of the device now; false where the state gives none: NOT_SUPPORTED. */
bool number(const struct call *call, enum key key, double *value);
double number_or(const struct call *call, enum key key, double otherwise);
ret_t number_unsigned(const struct call *call, enum key key, double scale, unsigned *value);
/* The counter of a rate: its total at the epoch and the integral since then. */
bool total(const struct call *call, enum key rate, double *value);
/* The mean of a rate over the last seconds, of the time since the epoch only. */
bool mean(const struct call *call, enum key rate, double seconds, double *value);
ret_t copy_text(const char *text, char *buffer, unsigned size);
void cpu_mask(const char *list, unsigned size, unsigned long *mask);
bool process_listed(const struct process *process);
double memory_used(const struct call *call);
void sleep_seconds(double seconds);
double clock_now(void);

#endif
