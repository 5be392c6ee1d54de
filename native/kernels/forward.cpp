// The forward kernels of each dtype; forward.inl.h has the algorithm and its tile shapes.
#include "kernels/forward.inl.h"

namespace {

template <class V, class S>
constexpr ForwardKernels forward_kernels() {
  return {Forward<V, S>::scratch_bytes, [](const Task& task) { Forward<V, S>(task).run(); }};
}

}  // namespace

const ForwardKernels REGARD_TABLE(forward)[4] = REGARD_EACH_DTYPE(forward_kernels);
