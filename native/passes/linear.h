// Linear attention, cut into tasks and run.
#pragma once
#include "machine/work.h"
#include "types.h"

namespace regard {

Outcome linear_forward(const LinearSpec& spec, const LinearCall& call, Interrupt interrupt);
Outcome linear_backward(const LinearSpec& spec, const LinearCall& call, const LinearGradients& grads,
                        Interrupt interrupt);

}  // namespace regard
