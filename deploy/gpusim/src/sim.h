/* A simulated NVML: what its files share. State comes from the file that HPML_GPUSIM names. */
#ifndef GPUSIM_SIM_H
#define GPUSIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define ALIAS(name, of) API extern __typeof(of) name __attribute__((alias(#of)));
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define TEXT_SIZE 96
#define NO_INSTANCE 0xFFFFFFFFu
#define VERSION(type, number) (sizeof(type) | (number) << 24) /* of an argument that is a struct */

typedef int ret_t;      /* nvmlReturn_t */
typedef void *handle_t; /* nvmlDevice_t: a number in the form of a pointer, never followed */
typedef unsigned long long u64;

enum { /* nvmlReturn_t */
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25,
};

/* A value as a function of the seconds since the state's epoch. */
enum curve_kind { CONSTANT, SQUARE, RAMP };
struct curve {
    enum curve_kind kind;
    double p[5];
};
bool curve_parse(const char *text, struct curve *curve);
double curve_value(const struct curve *curve, double t);
double curve_integral(const struct curve *curve, double t); /* from 0 to t */

struct setting { /* one line of the state file: a number or a curve, or a text as it stands there */
    char name[32], text[TEXT_SIZE];
    struct curve curve;
};

struct device { /* a GPU or a MIG device */
    struct setting *settings;
    unsigned count;
};

struct process {
    unsigned pid;
    char type;  /* C compute, G graphics, M client of MPS */
    bool ghost; /* listed although no such process lives */
    unsigned gi, ci;
    struct curve memory, sm, mem;
};

struct event {
    u64 id, type, data;
};

#define MIG_MAX 16
#define GPU_MAX 64

struct gpu {
    struct device self, mig[MIG_MAX];
    unsigned migs;
    struct process *processes;
    unsigned process_count;
    struct event *events;
    unsigned event_count;
};

struct fault {
    bool stuck;
    char function[TEXT_SIZE]; /* a pattern of fnmatch */
    double amount;            /* the code, or the seconds that a call is stuck */
    int gpu;                  /* -1: every one, and calls without a device */
};

struct state {
    int users;
    double epoch;
    unsigned generation, cuda, lost, gpus, fault_count;
    char driver[TEXT_SIZE];
    struct gpu *gpu[GPU_MAX];
    struct fault *faults;
};

struct state *state_parse(char *text); /* NULL: it says what is wrong on standard error */
void state_free(struct state *state);

/* One call of the library: the state it sees, when, and of which device. */
struct call {
    struct state *state;
    double now; /* seconds since 1970 */
    double t;   /* seconds since the state's epoch, at least 0 */
    unsigned index;
    struct gpu *gpu;
    bool is_mig;
    const struct device *device; /* the MIG device, else the GPU */
};

/* Which handles a function takes, and what it answers to a MIG device's: GPU_ONLY "invalid argument", SENSOR "not
   supported". */
enum scope { SYSTEM, ANY_DEVICE, GPU_ONLY, SENSOR };
ret_t call_open(struct call *call, const char *function, handle_t device, enum scope scope);
ret_t call_again(struct call *call); /* for a call that waits: the newest state, without faults */
void call_close(struct call *call);
ret_t fault_code(const struct call *call, const char *name, int gpu); /* of a `fault` for this name, or OK */
handle_t handle_of(const struct state *state, unsigned gpu, unsigned mig); /* mig: 0 none, 1 first */
bool is_lost(const struct call *call, unsigned gpu);

#define OPEN(name, handle, scope) \
    struct call name __attribute__((cleanup(call_close))) = {0}; \
    ret_t name##_opened = call_open(&name, __func__, handle, scope); \
    if (name##_opened != OK) \
        return name##_opened

const struct setting *find(const struct device *device, const char *name);
const char *text_of(const struct device *device, const char *name); /* empty where it is not given */
/* A number of the call's device now; false where the state gives none: NOT_SUPPORTED. */
bool number(const struct call *call, const char *name, double *value);
double number_or(const struct call *call, const char *name, double otherwise);
ret_t number_unsigned(const struct call *call, const char *name, double scale, unsigned *value);
/* The counter of a rate: its total at the epoch (NAME_base) and the integral since then. */
bool total(const struct call *call, const char *rate, double *value);
ret_t copy_text(const char *text, char *buffer, unsigned size);
double processes_memory(const struct call *call); /* of those on the call's device */
void sleep_seconds(double seconds);
double clock_now(void);

#endif
