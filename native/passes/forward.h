// A call, cut into tasks and run.
#pragma once
#include <vector>

#include "machine/work.h"
#include "types.h"

namespace regard {

Outcome forward(const Spec& spec, const Call& call, const std::vector<int64_t>& code, Interrupt interrupt);

// Query rows that meet a key together.
int rows_together(const Spec& spec);

// How a call of this shape would be cut.
struct Cut {
  int64_t tasks;
  int64_t scratch_bytes;  // of one thread
  int threads;
};
Cut cut(const Spec& spec, const Call& call, const std::vector<int64_t>& code);

}  // namespace regard
