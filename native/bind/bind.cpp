// The module regard._core. Arguments are structs, integers and the addresses of tensors; the Python caller
// owns all memory and has checked shapes and dtypes.
#include "bind/repeat.h"
#include "kernels/kernels.h"
#include "machine/cpu.h"
#include "machine/parallel.h"

using namespace nb::literals;
using namespace regard;

namespace {

// Writes the first counts[b] new rows of sample b to storage, from slot starts[b] on.
void write_rows(const Write& rows, const Sequence<int64_t>& first_slots,
                const Sequence<int64_t>& row_counts) {
  const Ints starts = to_vector(first_slots), counts = to_vector(row_counts);
  if (rows.sides.empty()) throw nb::value_error("sides: expected at least one, got none");
  if (static_cast<int64_t>(starts.size()) != rows.B || starts.size() != counts.size())
    throw nb::value_error("starts, counts: expected one number for each sample");
  run([&] { return regard::write(rows, starts, counts); });
}

void bind_attention(nb::module_& m) {
  nb::class_<Attention>(m, "Attention")
      .def(nb::init<const Spec&, const Sequence<int64_t>&>(), "spec"_a, "code"_a)
      .def("forward", &Attention::forward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "stats"_a, "residual"_a,
           "offset"_a, "operands"_a)
      .def("decode", &Attention::decode, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "offset"_a, "Lk"_a,
           "k_scale"_a, "v_scale"_a, "table"_a, "table_stride"_a, "operands"_a, "token"_a.none())
      .def("decodes", &Attention::decodes)
      .def("backward", &Attention::backward, "q"_a, "k"_a, "v"_a, "offset"_a, "operands"_a, "gradients"_a)
      .def("evidence", &Attention::evidence, "q"_a, "k"_a, "offset"_a, "operands"_a, "facts"_a)
      .def("cost", &Attention::cost, "offset"_a, "operands"_a)
      .def("spans", &Attention::spans, "batch"_a, "head"_a, "row"_a, "step"_a, "count"_a, "offset"_a,
           "operands"_a);
  nb::class_<Repeats>(m, "Repeats")
      .def(nb::init<nb::capsule, nb::callable, nb::callable, nb::callable>(), "exchange"_a, "empty_like"_a,
           "empty_strided"_a, "is_grad_enabled"_a)
      .def(
          "run",
          [](const Repeats& self, nb::handle q, nb::handle k, nb::handle v, nb::handle program,
             nb::handle offset, nb::handle bias, nb::handle scale, nb::handle softcap, nb::handle sink,
             nb::handle dropout, nb::handle seed, nb::handle return_lse, nb::handle impl) {
            return self.run(
                {q, k, v, program, offset, bias, scale, softcap, sink, dropout, seed, return_lse, impl});
          },
          "q"_a.none(), "k"_a.none(), "v"_a.none(), "program"_a.none(), "offset"_a.none(), "bias"_a.none(),
          "scale"_a.none(), "softcap"_a.none(), "sink"_a.none(), "dropout"_a.none(), "seed"_a.none(),
          "return_lse"_a.none(), "impl"_a.none())
      .def("remember", &Repeats::remember, "arguments"_a, "attention"_a, "spec"_a, "out"_a, "lse"_a.none())
      .def("clear", &Repeats::clear);
  m.def("write", &write_rows, "rows"_a, "starts"_a, "counts"_a);
}

void bind_linear(nb::module_& m) {
  m.attr("LINEAR_SEGMENT") = kLinearChunk * kLinearSegment;
  m.def(
      "linear_forward",
      [](const LinearSpec& spec, const LinearCall& call) {
        run([&] { return linear_forward(spec, call, kInterrupt); });
      },
      "spec"_a, "call"_a);
  m.def(
      "linear_backward",
      [](const LinearSpec& spec, const LinearCall& call, const LinearGradients& gradients) {
        run([&] { return linear_backward(spec, call, gradients, kInterrupt); });
      },
      "spec"_a, "call"_a, "gradients"_a);
}

void bind_machine(nb::module_& m) {
  m.def("compiled", [] { return instruction_sets(false); });
  m.def("runnable", [] { return instruction_sets(true); });
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("objection", [](const char* name) { return objection(name); }, "name"_a);
  m.def("multiplies_pairs", [] { return multiplies_pairs(kBFloat16); });
  m.def("panel_rows", [] { return panel_rows(kFloat32); });
  m.def("use", [](const char* name) { return use(name); }, "name"_a);
  m.def("open_pool", [](const char* library) { return open_pool(library); }, "library"_a);
  m.def("threads", &threads);
  m.def("compiler", [] { return std::string("C++ " __VERSION__); });
  m.def("fma_probe", &fma_probe, "rounds"_a, "bfloat16"_a = false, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "read_probe",
      [](const Sequence<Block>& sequence, int threads) {
        const std::vector<Block> blocks = to_vector(sequence);
        nb::gil_scoped_release release;
        read_once(blocks, threads);
      },
      "blocks"_a, "threads"_a);
}

// nanobind registers every instance in a hash table. If that cannot grow, the process ends, so it gets its
// size here: _call/memory.py keeps up to three caches of 4096 Attention objects.
void reserve_instances() {
  nb::list instances;
  for (int i = 0; i < 3 << 12; ++i) instances.append(Token{});
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // Attention objects are cached until the process exits
  bind_structs(m);
  bind_attention(m);
  bind_linear(m);
  bind_projection(m);
  bind_machine(m);
  reserve_instances();
}
