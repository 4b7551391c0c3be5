/* Curves: constant, square and ramp, with their exact integrals; README.md defines them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static const struct {
    const char *name;
    int least, most; /* parameters */
} kinds[] = {{"", 1, 1}, {"square:", 4, 5}, {"ramp:", 2, 2}};

bool curve_parse(const char *text, struct curve *curve) {
    *curve = (struct curve){.kind = RAMP, .p = {[4] = 0.5}}; /* half of a square's period is high */
    while (strncmp(text, kinds[curve->kind].name, strlen(kinds[curve->kind].name)) != 0)
        curve->kind--;
    text += strlen(kinds[curve->kind].name);
    double *p = curve->p;
    char *end = "";
    int count = 0;
    do {
        p[count++] = strtod(text, &end);
        if (end == text)
            return false;
        text = end + 1;
    } while (*end == ',' && count < kinds[curve->kind].most);
    bool whole = *end == '\0' && count >= kinds[curve->kind].least;
    return whole && (curve->kind != SQUARE || (p[0] > 0 && p[3] >= 0 && p[4] >= 0 && p[4] <= 1));
}

/* p: period, low, high, phase, duty (the share of a period that is high, which comes first). */
static double square_from_zero(const double *p, double x) {
    double periods = floor(x / p[0]), high = p[4] * p[0];
    double high_seconds = periods * high + fmin(x - periods * p[0], high);
    return p[1] * x + (p[2] - p[1]) * high_seconds;
}

double curve_value(const struct curve *curve, double t) {
    const double *p = curve->p;
    switch (curve->kind) {
    case SQUARE: return fmod(t + p[3], p[0]) < p[4] * p[0] ? p[2] : p[1];
    case RAMP: return p[0] + p[1] * t;
    default: return p[0];
    }
}

double curve_integral(const struct curve *curve, double t) {
    const double *p = curve->p;
    switch (curve->kind) {
    case SQUARE: return square_from_zero(p, t + p[3]) - square_from_zero(p, p[3]);
    case RAMP: return p[0] * t + p[1] * t * t / 2;
    default: return p[0] * t;
    }
}
