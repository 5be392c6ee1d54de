// Which instruction sets were compiled, which this CPU can run, and which one is in use.
#pragma once
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace regard {

std::vector<std::string> compiled();
std::vector<std::string> runnable();
const Kernels& kernels();
// Query rows of a panel with these kernels.
int panel_rows(DType dtype);
// False when the name is unknown or this CPU cannot run it.
bool use(const std::string& name);

}  // namespace regard
