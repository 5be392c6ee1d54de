// Few query rows against many keys: a call is cut along its keys.
#pragma once
#include <vector>

#include "machine/work.h"
#include "passes/forward.h"
#include "types.h"

namespace regard {

// Whether a call of this shape has so few query rows that `decode` is the way.
bool decodes(const Spec& spec);

Outcome decode(const Spec& spec, const Call& call, const std::vector<int64_t>& code, Interrupt interrupt);

Cut cut_decode(const Spec& spec, const Call& call, const std::vector<int64_t>& code);

}  // namespace regard
