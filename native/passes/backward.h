// The gradients of a call, cut into chunks of keys and run.
#pragma once
#include <vector>

#include "machine/work.h"
#include "types.h"

namespace regard {

Outcome backward(const Spec& spec, const Call& call, const Gradients& grads, const std::vector<int64_t>& code,
                 Interrupt interrupt);

}  // namespace regard
