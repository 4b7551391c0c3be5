/* Curves: constant, square, sine and ramp, with their exact integrals. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

/* p: period, low, high, phase, duty (the share of a period that is high, which comes first). */
static double square_value(const double *p, double t) {
    double u = fmod(t + p[3], p[0]);
    return u < p[4] * p[0] ? p[2] : p[1];
}

static double square_from_zero(const double *p, double x) {
    double periods = floor(x / p[0]), rest = x - periods * p[0], high = p[4] * p[0];
    double whole = high * p[2] + (p[0] - high) * p[1];
    double part = rest < high ? rest * p[2] : high * p[2] + (rest - high) * p[1];
    return periods * whole + part;
}

static double sine_angle(const double *p, double t) {
    return 2 * M_PI * (t + p[3]) / p[0];
}

double curve_value(const struct curve *curve, double t) {
    const double *p = curve->p;
    switch (curve->kind) {
    case SQUARE:
        return square_value(p, t);
    case SINE:
        return p[1] + (p[2] - p[1]) * (1 + sin(sine_angle(p, t))) / 2;
    case RAMP: {
        double value = p[0] + p[1] * t;
        if (isnan(p[2]))
            return value;
        return p[1] >= 0 ? fmin(value, p[2]) : fmax(value, p[2]);
    }
    case CONSTANT:
        break;
    }
    return p[0];
}

double curve_integral(const struct curve *curve, double t) {
    const double *p = curve->p;
    switch (curve->kind) {
    case SQUARE:
        return square_from_zero(p, t + p[3]) - square_from_zero(p, p[3]);
    case SINE: {
        double half = (p[2] - p[1]) / 2, turn = p[0] / (2 * M_PI);
        double waves = cos(sine_angle(p, 0)) - cos(sine_angle(p, t));
        return (p[1] + half) * t + half * turn * waves;
    }
    case RAMP: {
        double reached = t; /* when the limit is reached, if it is before t */
        if (!isnan(p[2]) && p[1] != 0)
            reached = fmin(t, fmax(0, (p[2] - p[0]) / p[1]));
        return p[0] * reached + p[1] * reached * reached / 2 + curve_value(curve, t) * (t - reached);
    }
    case CONSTANT:
        break;
    }
    return p[0] * t;
}

static int numbers(const char *text, double *p, int most) {
    int count = 0;
    while (count < most) {
        char *end;
        p[count] = strtod(text, &end);
        if (end == text)
            return -1;
        count++;
        if (*end == '\0')
            return count;
        if (*end != ',')
            return -1;
        text = end + 1;
    }
    return -1;
}

bool curve_parse(const char *text, struct curve *curve) {
    memset(curve, 0, sizeof *curve);
    double *p = curve->p;
    const char *colon = strchr(text, ':');
    if (colon == NULL) {
        curve->kind = CONSTANT;
        return numbers(text, p, 1) == 1;
    }
    size_t length = (size_t)(colon - text);
    if (length == 6 && strncmp(text, "square", length) == 0) {
        curve->kind = SQUARE;
        p[4] = 0.5;
        int count = numbers(colon + 1, p, 5);
        return count >= 4 && p[0] > 0 && p[3] >= 0 && p[4] >= 0 && p[4] <= 1;
    }
    if (length == 4 && strncmp(text, "sine", length) == 0) {
        curve->kind = SINE;
        return numbers(colon + 1, p, 4) == 4 && p[0] > 0;
    }
    if (length == 4 && strncmp(text, "ramp", length) == 0) {
        curve->kind = RAMP;
        p[2] = NAN;
        return numbers(colon + 1, p, 3) >= 2;
    }
    return false;
}
