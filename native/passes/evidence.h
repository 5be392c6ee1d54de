// Facts about the weights of a call, without its matrix.
#pragma once
#include <vector>

#include "machine/work.h"
#include "types.h"

namespace regard {

// The call needs no out and no values: Dv is 0.
Outcome evidence(const Spec& spec, const Call& call, const Facts& facts, const std::vector<int64_t>& code,
                 Interrupt interrupt);

}  // namespace regard
