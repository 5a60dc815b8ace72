/* The numbers of an optimizer's step, in double as torch.optim computes them. */
#include "kernels/kernels.h"

#include <math.h>

void fc_adam_set(fc_adam *adam, const fc_adam_options *options, double step)
{
    const double decay = options->lr * options->weight_decay;
    const double correction1 = 1.0 - pow(options->beta1, step);
    const double correction2 = 1.0 - pow(options->beta2, step);

    adam->decay = options->is_decoupled ? (float)(1.0 - decay) : 1.0f;
    adam->l2 = options->is_decoupled ? 0.0f : (float)options->weight_decay;
    adam->weight1 = (float)(1.0 - options->beta1);
    adam->beta2 = (float)options->beta2;
    adam->weight2 = (float)(1.0 - options->beta2);
    adam->correction = (float)pow(correction2, 0.5);
    adam->eps = (float)options->eps;
    adam->step_size = (float)-(options->lr / correction1);
    adam->is_maximized = options->is_maximized;
}
