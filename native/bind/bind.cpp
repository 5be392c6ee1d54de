// The door between Python and the core: integers in, integers out. No arithmetic, no tensors.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/unpack.h"
#include "machine/cpu.h"
#include "machine/parallel.h"
#include "mask/spans.h"
#include "passes/backward.h"
#include "passes/decode.h"
#include "passes/evidence.h"
#include "passes/forward.h"

using namespace regard;

namespace {

void write_new(const Ints& numbers, const Ints& starts, const Ints& counts) {
  const size_t sides = (numbers.size() - kWriteNumbers) / kSideNumbers;
  if (numbers.size() < kWriteNumbers || sides * kSideNumbers + kWriteNumbers != numbers.size() || !sides)
    throw nb::value_error("numbers: expected those of unpack_write");
  const Write rows = unpack_write(numbers);
  if (static_cast<int64_t>(starts.size()) != rows.B || starts.size() != counts.size())
    throw nb::value_error("starts, counts: expected one for each sample");
  run([&] { return regard::write(rows, starts, counts); });
}

// One checked call, with everything but its data.
class Attention {
 public:
  Attention(const Ints& numbers, const Ints& code, double scale, double softcap, int64_t drop_below,
            double keep_scale)
      : code_(code) {
    if (numbers.size() != kSpecNumbers) throw nb::value_error("numbers: expected those of unpack_spec");
    spec_ = unpack_spec(numbers.data());
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

  // where: q, k, v, out, lse, offset, Lk, scales of K, scales of V, table, its stride; then, if the last
  // token is to be written first, the numbers of unpack_token
  void decode(const Ints& where, const Ints& extras, const Ints& tensors) const {
    const bool writes = where.size() == 11 + kTokenNumbers;
    if (where.size() != 11 && !writes) throw nb::value_error("expected 11 numbers, or those of a token more");
    const std::vector<MaskTensor> mask = unpack_tensors(tensors);
    Call call{};
    set(call, where[0], where[1], where[2], where[3], where[4], where[5]);
    set_extras(call, extras, mask);
    call.k_scale = pointer<const void>(where[7]), call.v_scale = pointer<const void>(where[8]);
    call.table = pointer<const int32_t>(where[9]), call.table_stride = where[10];
    Spec spec = spec_;
    spec.Lk = where[6];
    if (writes) {
      const Write token = unpack_token(spec, call, where.data() + 11);
      run([&] { return regard::write(token, Ints(spec.B, spec.Lk - 1), Ints(spec.B, 1)); });
    }
    run([&] { return regard::decode(spec, call, code_, {signal_pending}); });
  }

  bool decodes() const { return regard::decodes(spec_); }

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

  // facts: the numbers of unpack_facts
  void evidence(int64_t q, int64_t k, int64_t offset, const Ints& extras, const Ints& tensors,
                const Ints& facts) const {
    if (facts.size() != kFactNumbers) throw nb::value_error("facts: expected those of unpack_facts");
    const std::vector<MaskTensor> mask = unpack_tensors(tensors);
    Call call{};
    set(call, q, k, k, 0, 0, offset);
    set_extras(call, extras, mask);
    const Facts wanted = unpack_facts(facts.data());
    run([&] { return regard::evidence(spec_, call, wanted, code_, {signal_pending}); });
  }

  std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int> cost(
      int64_t offset, const Ints& extras, const Ints& tensors) const {
    const std::vector<MaskTensor> mask = unpack_tensors(tensors);
    Call call{};
    call.offset = offset;
    set_extras(call, extras, mask);
    const Cost c = measure(Spans(code_, spec_, call), spec_, rows_together(spec_));
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
    unpack_extras(x.data(), call);
    call.tensors = tensors.data();
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
      .def("decode", &Attention::decode)
      .def("decodes", &Attention::decodes)
      .def("backward", &Attention::backward)
      .def("evidence", &Attention::evidence)
      .def("cost", &Attention::cost)
      .def("runs", &Attention::runs);
  m.def("write", &write_new);
  bind_linear(m);
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
