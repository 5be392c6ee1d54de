// Instruction sets: which are compiled, which the CPU supports, and which one is active.
#pragma once
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace regard {

// Lists the names of the compiled instruction sets, or only those that the CPU supports.
std::vector<std::string> instruction_sets(bool runnable);
// Returns the active instruction set's kernels.
const Kernels& kernels();
// Returns the number of query rows in a panel of the active kernels.
int panel_rows(DType dtype);
// Makes an instruction set active. Returns false if it is not compiled or the CPU does not support it.
bool use(const std::string& name);

}  // namespace regard
