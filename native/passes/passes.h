// The passes: each cuts a call into tasks and spans them. `code` is the mask's program.
#pragma once
#include <vector>

#include "machine/work.h"
#include "types.h"

namespace regard {

using Ints = std::vector<int64_t>;

Outcome forward(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt);

Outcome backward(const Spec& spec, const Call& call, const Gradients& grads, const Ints& code,
                 Interrupt interrupt);

// Whether there are so few query rows that the call is cut along its keys.
bool decodes(const Spec& spec);
Outcome decode(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt);

// The call needs no out and no values: Dv is 0.
Outcome evidence(const Spec& spec, const Call& call, const Facts& facts, const Ints& code,
                 Interrupt interrupt);

Outcome linear_forward(const LinearSpec& spec, const LinearCall& call, Interrupt interrupt);
Outcome linear_backward(const LinearSpec& spec, const LinearCall& call, const LinearGradients& grads,
                        Interrupt interrupt);

// Query rows that meet a key together.
int rows_together(const Spec& spec);

// How a call of this shape would be cut.
struct Cut {
  int64_t tasks;
  int64_t scratch_bytes;  // of one thread
  int threads;
};
Cut cut(const Spec& spec, const Call& call, const Ints& code);
Cut cut_decode(const Spec& spec, const Call& call, const Ints& code);

}  // namespace regard
