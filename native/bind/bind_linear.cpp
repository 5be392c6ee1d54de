// The door for linear attention: integers in. No arithmetic, no tensors.
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/unpack.h"
#include "kernels/kernels.h"
#include "passes/linear.h"

namespace regard {
namespace {

// One checked call, with everything but its data. Numbers as unpack.h says.
class Linear {
 public:
  Linear(const Ints& numbers, double scale) {
    if (numbers.size() != kLinearSpecNumbers) throw nb::value_error("expected 24 numbers");
    spec_ = unpack_linear_spec(numbers.data());
    spec_.scale = scale;
  }

  void forward(const Ints& where) const {
    const LinearCall call = call_of(where);
    run([&] { return linear_forward(spec_, call, {signal_pending}); });
  }

  void backward(const Ints& where, const Ints& gradients) const {
    if (gradients.size() != kLinearGradientNumbers) throw nb::value_error("expected 26 gradients");
    const LinearCall call = call_of(where);
    const LinearGradients grads = unpack_linear_gradients(gradients.data());
    run([&] { return linear_backward(spec_, call, grads, {signal_pending}); });
  }

 private:
  static LinearCall call_of(const Ints& where) {
    if (where.size() != kLinearCallNumbers) throw nb::value_error("expected 14 addresses");
    return unpack_linear_call(where.data());
  }

  LinearSpec spec_{};
};

}  // namespace

void bind_linear(nb::module_& m) {
  m.attr("LINEAR_SEGMENT") = kLinearChunk * kLinearSegment;
  nb::class_<Linear>(m, "Linear")
      .def(nb::init<const Ints&, double>(), nb::arg("numbers"), nb::arg("scale"))
      .def("forward", &Linear::forward)
      .def("backward", &Linear::backward);
}

}  // namespace regard
