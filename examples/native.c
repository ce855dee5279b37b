/* Runs an exported layer as an audio program would: sample by sample, then in blocks of 64. */
#include <math.h>
#include <stdio.h>
#include <time.h>

#include "amp.h"
#include "plain_lstm.h" /* the same layer by plain loops, with its weights */

enum { SAMPLES = 96000 };

static float x[SAMPLES], y[SAMPLES][amp_OUTPUTS], plain[SAMPLES][amp_OUTPUTS];
static amp_t amp; /* all memory that the layer needs */

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

int main(void) {
    for (int t = 0; t < SAMPLES; ++t) x[t] = 0.5f * sinf(0.05f * t);
    double most = 0, begin = seconds();
    plain_lstm(x, &plain[0][0], SAMPLES);
    printf("plain loops, -O3 -ffast-math: %6.2f million samples a second\n",
           SAMPLES / (seconds() - begin) / 1e6);
    for (int block = 1; block <= 64; block *= 64) {
        amp_reset(&amp);
        begin = seconds();
        for (int t = 0; t < SAMPLES; t += block) amp_step(&amp, x + t, y[t], block);
        printf("amp_step, %2d at a time:        %6.2f million samples a second\n", block,
               SAMPLES / (seconds() - begin) / 1e6);
        for (int t = 0; t < SAMPLES; ++t)
            for (int unit = 0; unit < amp_OUTPUTS; ++unit)
                most = fmax(most, fabs(y[t][unit] - plain[t][unit]));
    }
    printf("largest difference %.1e\n", most);
    return most > 1e-4;
}
