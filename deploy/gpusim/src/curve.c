/* Curves: constant, square, sine and ramp, with their exact integrals; README.md defines them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static const struct {
    const char *name;
    int least, most; /* parameters */
} kinds[] = {{"", 1, 1}, {"square:", 4, 5}, {"sine:", 4, 4}, {"ramp:", 2, 3}};

bool curve_parse(const char *text, struct curve *curve) {
    *curve = (struct curve){.kind = RAMP, .p = {0, 0, NAN, 0, 0.5}}; /* no limit; half of the period is high */
    while (strncmp(text, kinds[curve->kind].name, strlen(kinds[curve->kind].name)) != 0)
        curve->kind--;
    text += strlen(kinds[curve->kind].name);
    double *p = curve->p;
    int count = 0;
    for (char *end;; text = end + 1) {
        p[count++] = strtod(text, &end);
        if (end == text)
            return false;
        if (*end == ',' && count < kinds[curve->kind].most)
            continue;
        if (*end != '\0' || count < kinds[curve->kind].least)
            return false;
        break;
    }
    bool repeats = curve->kind == SQUARE || curve->kind == SINE;
    return !repeats || (p[0] > 0 && p[3] >= 0 && p[4] >= 0 && p[4] <= 1);
}

/* p: period, low, high, phase, duty (the share of a period that is high, which comes first). */
static double square_from_zero(const double *p, double x) {
    double periods = floor(x / p[0]), high = p[4] * p[0];
    double high_seconds = periods * high + fmin(x - periods * p[0], high);
    return p[1] * x + (p[2] - p[1]) * high_seconds;
}

static double sine_angle(const double *p, double t) {
    return 2 * M_PI * (t + p[3]) / p[0];
}

/* p: start, rate, limit. The seconds until the limit, if it is reached before t. */
static double ramp_seconds(const double *p, double t) {
    return isnan(p[2]) || p[1] == 0 ? t : fmin(t, fmax(0, (p[2] - p[0]) / p[1]));
}

double curve_value(const struct curve *curve, double t) {
    const double *p = curve->p;
    switch (curve->kind) {
    case SQUARE: return fmod(t + p[3], p[0]) < p[4] * p[0] ? p[2] : p[1];
    case SINE: return p[1] + (p[2] - p[1]) * (1 + sin(sine_angle(p, t))) / 2;
    case RAMP: return p[0] + p[1] * ramp_seconds(p, t);
    default: return p[0];
    }
}

double curve_integral(const struct curve *curve, double t) {
    const double *p = curve->p;
    double half = (p[2] - p[1]) / 2, rising = ramp_seconds(p, t);
    switch (curve->kind) {
    case SQUARE: return square_from_zero(p, t + p[3]) - square_from_zero(p, p[3]);
    case SINE: return (p[1] + half) * t + half * p[0] / (2 * M_PI) * (cos(sine_angle(p, 0)) - cos(sine_angle(p, t)));
    case RAMP: return p[0] * rising + p[1] * rising * rising / 2 + curve_value(curve, t) * (t - rising);
    default: return p[0] * t;
    }
}
