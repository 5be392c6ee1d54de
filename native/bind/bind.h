// What the files of the binding share.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

#include "types.h"

namespace regard {

// What a call has besides q, k, v and their results; those are still to be set.
struct Extras : Call {
  std::vector<MaskTensor> tensors;
};

void bind_structs(nanobind::module_& m);

}  // namespace regard
