// Which instruction sets were compiled, which this CPU can run, and which one is in use.
#pragma once
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace regard {

// All that were compiled, or those of them that this CPU can run.
std::vector<std::string> instruction_sets(bool runnable);
const Kernels& kernels();
// Query rows of a panel with these kernels.
int panel_rows(DType dtype);
// False when the name is unknown or this CPU cannot run it.
bool use(const std::string& name);

}  // namespace regard
