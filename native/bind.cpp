// The door between Python and the core: integers in, integers out. No arithmetic, no tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "backward.h"
#include "cpu.h"
#include "forward.h"
#include "parallel.h"
#include "spans.h"

namespace nb = nanobind;
using namespace regard;
using Ints = std::vector<int64_t>;

namespace {

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

Strides strides(const int64_t* at) { return {at[0], at[1], at[2], at[3]}; }

// Each tensor is nine numbers: address, sizes and strides for (b, h, q, k).
std::vector<MaskTensor> unpack_tensors(const Ints& numbers) {
  std::vector<MaskTensor> tensors(numbers.size() / 9);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t* at = numbers.data() + 9 * i;
    tensors[i].data = pointer<const void>(at[0]);
    for (int d = 0; d < 4; ++d) {
      tensors[i].size[d] = at[1 + d];
      tensors[i].stride[d] = at[5 + d];
    }
  }
  return tensors;
}

Gradients unpack_gradients(const int64_t* n) {
  Gradients g{};
  g.out = pointer<const void>(n[0]), g.rest = pointer<const void>(n[1]), g.dout = pointer<const void>(n[2]);
  g.dlse = pointer<const void>(n[3]), g.stats = pointer<const void>(n[4]);
  g.dq = pointer<void>(n[5]), g.dk = pointer<void>(n[6]), g.dv = pointer<void>(n[7]);
  g.dbias = pointer<void>(n[8]), g.dby_head = pointer<void>(n[9]), g.dsink = pointer<void>(n[10]);
  g.dout_stride = strides(n + 11), g.dk_stride = strides(n + 15), g.dv_stride = strides(n + 19);
  g.dbias_stride = strides(n + 23);
  return g;
}

bool signal_pending() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// One checked call, with everything but its data.
class Attention {
 public:
  // numbers: dtype, bias dtype, bias kind, B, Hq, Hkv, Lq, Lk, D, Dv, then four strides each of q, k, v, out
  // and bias
  Attention(const Ints& numbers, const Ints& code, double scale, double softcap, int64_t drop_below,
            double keep_scale)
      : code_(code) {
    if (numbers.size() != 30) throw nb::value_error("expected 30 numbers");
    const int64_t* n = numbers.data();
    spec_.dtype = static_cast<DType>(n[0]);
    spec_.bias_dtype = static_cast<DType>(n[1]);
    spec_.bias = static_cast<BiasKind>(n[2]);
    spec_.B = n[3], spec_.Hq = n[4], spec_.Hkv = n[5], spec_.Lq = n[6], spec_.Lk = n[7], spec_.D = n[8],
    spec_.Dv = n[9];
    spec_.q = strides(n + 10), spec_.k = strides(n + 14), spec_.v = strides(n + 18),
    spec_.out = strides(n + 22);
    spec_.bias_stride = strides(n + 26);
    spec_.scale = scale;
    spec_.softcap = softcap;
    spec_.drop_below = static_cast<uint32_t>(drop_below);
    spec_.keep_scale = keep_scale;
  }

  void forward(int64_t q, int64_t k, int64_t v, int64_t out, int64_t lse, int64_t offset) const {
    Call call{};
    set(call, q, k, v, out, lse, offset);
    run([&] { return regard::forward(spec_, call, code_, {signal_pending}); });
  }

  // extras: bias, per-head numbers, first distance, distances, sink, offsets, seed, stats, rest
  void forward_with(int64_t q, int64_t k, int64_t v, int64_t out, int64_t lse, int64_t offset,
                    const Ints& extras, const Ints& tensors) const {
    const std::vector<MaskTensor> mask = unpack_tensors(tensors);
    Call call{};
    set(call, q, k, v, out, lse, offset);
    set_extras(call, extras, mask);
    run([&] { return regard::forward(spec_, call, code_, {signal_pending}); });
  }

  // gradients: the addresses of out, rest, dout, dlse, stats, dq, dk, dv, dbias, dby_head, dsink, then four
  // strides each of dout, dk, dv and dbias
  void backward(int64_t q, int64_t k, int64_t v, int64_t offset, const Ints& extras, const Ints& tensors,
                const Ints& gradients) const {
    if (gradients.size() != 27) throw nb::value_error("expected 27 gradients");
    const std::vector<MaskTensor> mask = unpack_tensors(tensors);
    Call call{};
    set(call, q, k, v, 0, 0, offset);
    set_extras(call, extras, mask);
    const Gradients grads = unpack_gradients(gradients.data());
    run([&] { return regard::backward(spec_, call, grads, code_, {signal_pending}); });
  }

  std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int> cost(
      int64_t offset, const Ints& extras, const Ints& tensors) const {
    const std::vector<MaskTensor> mask = unpack_tensors(tensors);
    Call call{};
    call.offset = offset;
    set_extras(call, extras, mask);
    const Cost c = measure(Spans(code_, spec_, call), spec_, panel_rows(spec_.dtype));
    const Cut plan = cut(spec_, call, code_);
    return {c.pairs, c.touched, c.full, c.partial, c.empty, plan.tasks, plan.scratch_bytes, plan.threads};
  }

  std::vector<std::tuple<int64_t, int64_t, uint32_t>> runs(int64_t batch, int64_t head, int64_t row,
                                                           int64_t step, int count, int64_t offset,
                                                           const Ints& extras, const Ints& tensors) const {
    const std::vector<MaskTensor> mask = unpack_tensors(tensors);
    Call call{};
    call.offset = offset;
    set_extras(call, extras, mask);
    Runs found;
    Spans(code_, spec_, call).find({batch, head, row, step, count}, found);
    std::vector<std::tuple<int64_t, int64_t, uint32_t>> list;
    for (const Run& r : found) list.emplace_back(r.begin, r.end, r.lanes);
    return list;
  }

 private:
  static void set(Call& call, int64_t q, int64_t k, int64_t v, int64_t out, int64_t lse, int64_t offset) {
    call.q = pointer<const void>(q), call.k = pointer<const void>(k), call.v = pointer<const void>(v);
    call.out = pointer<void>(out), call.lse = pointer<void>(lse);
    call.offset = offset;
  }

  static void set_extras(Call& call, const Ints& x, const std::vector<MaskTensor>& tensors) {
    if (x.size() != 9) throw nb::value_error("expected 9 extras");
    call.bias = pointer<const void>(x[0]), call.by_head = pointer<const void>(x[1]);
    call.distance_low = x[2], call.distances = x[3];
    call.sink = pointer<const void>(x[4]), call.offsets = pointer<const int64_t>(x[5]);
    call.seed = static_cast<uint64_t>(x[6]), call.stats = pointer<void>(x[7]),
    call.rest = pointer<void>(x[8]);
    call.tensors = tensors.data();
  }

  template <class Work>
  static void run(Work work) {
    Outcome outcome;
    {
      nb::gil_scoped_release release;
      outcome = work();
    }
    if (outcome == Outcome::kInterrupted) throw nb::python_error();
    if (outcome == Outcome::kOutOfMemory) throw std::bad_alloc();
  }

  Spec spec_{};
  Ints code_;
};

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // cached calls live as long as the process
  nb::class_<Attention>(m, "Attention")
      .def(nb::init<const Ints&, const Ints&, double, double, int64_t, double>(), nb::arg("numbers"),
           nb::arg("code"), nb::arg("scale"), nb::arg("softcap"), nb::arg("drop_below"),
           nb::arg("keep_scale"))
      .def("forward", &Attention::forward)
      .def("forward_with", &Attention::forward_with)
      .def("backward", &Attention::backward)
      .def("cost", &Attention::cost)
      .def("runs", &Attention::runs);
  m.def("compiled", &compiled);
  m.def("runnable", &runnable);
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("use", &use);
  m.def("open_pool", &open_pool);
  m.def("threads", &threads);
  m.def("compiler", [] { return std::string("C++ " __VERSION__); });
  m.def(
      "fma_probe", [](int64_t rounds) { return kernels().fma_probe(rounds); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "read_probe",
      [](int64_t data, int64_t count) { return kernels().read_probe(pointer<const float>(data), count); },
      nb::call_guard<nb::gil_scoped_release>());
}
