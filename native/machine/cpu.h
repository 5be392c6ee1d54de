// Instruction sets: which are compiled, which the CPU supports, and which one is active.
#pragma once
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace regard {

// Lists the names of the compiled instruction sets, or only those that the CPU supports.
std::vector<std::string> instruction_sets(bool runnable);
// Returns why an instruction set is not used by default, or "" if no reason is against it.
std::string objection(const std::string& name);
// Returns the active instruction set's kernels.
const Kernels& kernels();
// Returns the number of query rows in a panel of the active kernels.
int panel_rows(DType dtype);
// Makes an instruction set active. Returns false if it is not compiled or the CPU does not support it.
bool use(const std::string& name);
// Returns whether the active kernels multiply numbers of this dtype in pairs.
bool multiplies_pairs(DType dtype);
// Runs products in registers, in float or as for bfloat16. Returns the number of floating point
// operations.
double fma_probe(int64_t rounds, bool bfloat16);

}  // namespace regard
