// The module regard._core. Arguments are structs, integers and the addresses of tensors; the Python caller
// owns all memory and has checked shapes and dtypes.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "bind/fields.h"
#include "kernels/kernels.h"
#include "machine/cpu.h"
#include "machine/parallel.h"
#include "mask/spans.h"
#include "passes/passes.h"
#include "passes/write.h"

using namespace nb::literals;
using namespace regard;

namespace {

bool signal_pending() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

constexpr Interrupt kInterrupt{signal_pending};

// Runs `work` without the GIL. Raises if a signal handler raised, memory ran out or a page does not exist.
template <class Work>
void run(Work work) {
  Outcome outcome;
  {
    nb::gil_scoped_release release;
    outcome = work();
  }
  if (outcome == Outcome::kInterrupted) throw nb::python_error();
  if (outcome == Outcome::kOutOfMemory) throw std::bad_alloc();
  if (outcome == Outcome::kWrongPage) throw nb::index_error("table: expected pages that exist, got others");
}

Call make_call(const Operands& operands, int64_t q, int64_t k, int64_t v, int64_t offset) {
  Call call = operands;
  set(call.q, q), set(call.k, k), set(call.v, v);
  call.offset = offset;
  call.tensors = operands.tensors.data();
  return call;
}

// A call that has been checked, without its data: the Spec and the mask program `code`.
class Attention {
 public:
  Attention(const Spec& spec, const Sequence<int64_t>& code) : spec_(spec), code_(to_vector(code)) {}

  void forward(int64_t q, int64_t k, int64_t v, int64_t out, int64_t lse, int64_t offset,
               const Operands& operands) const {
    Call call = make_call(operands, q, k, v, offset);
    set(call.out, out), set(call.lse, lse);
    run([&] { return regard::forward(spec_, call, code_, kInterrupt); });
  }

  // Attends to the first Lk stored keys. If `token` is given, first writes it to storage as key Lk - 1.
  void decode(int64_t q, int64_t k, int64_t v, int64_t out, int64_t lse, int64_t offset, int64_t Lk,
              int64_t k_scale, int64_t v_scale, int64_t table, int64_t table_stride, const Operands& operands,
              const Token* token) const {
    Call call = make_call(operands, q, k, v, offset);
    set(call.out, out), set(call.lse, lse), set(call.k_scale, k_scale), set(call.v_scale, v_scale);
    set(call.table, table), call.table_stride = table_stride;
    Spec spec = spec_;
    spec.Lk = Lk;
    if (token) run([&] { return write_token(spec, call, *token); });
    run([&] { return regard::decode(spec, call, code_, kInterrupt); });
  }

  // Returns whether forward takes the decode pass for this Spec.
  bool decodes() const { return regard::decodes(spec_); }

  void backward(int64_t q, int64_t k, int64_t v, int64_t offset, const Operands& operands,
                const Gradients& gradients) const {
    const Call call = make_call(operands, q, k, v, offset);
    run([&] { return regard::backward(spec_, call, gradients, code_, kInterrupt); });
  }

  void evidence(int64_t q, int64_t k, int64_t offset, const Operands& operands, const Facts& facts) const {
    const Call call = make_call(operands, q, k, k, offset);
    run([&] { return regard::evidence(spec_, call, facts, code_, kInterrupt); });
  }

  // Counts the (query, key) pairs that the mask allows and the tasks, threads and scratch bytes of forward.
  std::map<std::string, int64_t> cost(int64_t offset, const Operands& operands) const {
    const Call call = make_call(operands, 0, 0, 0, offset);
    Cost cost;
    TaskPlan plan;
    run([&] { return count_pairs(spec_, call, code_, kInterrupt, cost); });
    run([&] { return plan_tasks(spec_, call, code_, kInterrupt, plan); });
    return {{"pairs", cost.pairs},     {"touched", cost.touched},
            {"full", cost.full},       {"partial", cost.partial},
            {"empty", cost.empty},     {"tasks", plan.tasks},
            {"threads", plan.threads}, {"scratch_bytes", plan.scratch_bytes * plan.threads}};
  }

  // Returns the spans (begin, end, lanes) of the rows row, row + step, ... Bit i of lanes is the i-th row.
  std::vector<std::tuple<int64_t, int64_t, uint32_t>> spans(int64_t batch, int64_t head, int64_t row,
                                                            int64_t step, int count, int64_t offset,
                                                            const Operands& operands) const {
    const Call call = make_call(operands, 0, 0, 0, offset);
    Spans spans;
    SpanFinder(code_, spec_, call).find({batch, head, row, step, count}, spans);
    std::vector<std::tuple<int64_t, int64_t, uint32_t>> tuples;
    for (const Span& span : spans) tuples.emplace_back(span.begin, span.end, span.lanes);
    return tuples;
  }

 private:
  Spec spec_;
  Ints code_;
};

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
      .def("forward", &Attention::forward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "offset"_a, "operands"_a)
      .def("decode", &Attention::decode, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "offset"_a, "Lk"_a,
           "k_scale"_a, "v_scale"_a, "table"_a, "table_stride"_a, "operands"_a, "token"_a.none())
      .def("decodes", &Attention::decodes)
      .def("backward", &Attention::backward, "q"_a, "k"_a, "v"_a, "offset"_a, "operands"_a, "gradients"_a)
      .def("evidence", &Attention::evidence, "q"_a, "k"_a, "offset"_a, "operands"_a, "facts"_a)
      .def("cost", &Attention::cost, "offset"_a, "operands"_a)
      .def("spans", &Attention::spans, "batch"_a, "head"_a, "row"_a, "step"_a, "count"_a, "offset"_a,
           "operands"_a);
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
  m.def("panel_rows", [] { return panel_rows(kFloat32); });
  m.def("use", [](const char* name) { return use(name); }, "name"_a);
  m.def("open_pool", [](const char* library) { return open_pool(library); }, "library"_a);
  m.def("threads", &threads);
  m.def("compiler", [] { return std::string("C++ " __VERSION__); });
  m.def(
      "fma_probe", [](int64_t rounds) { return kernels().fma_probe(rounds); }, "rounds"_a,
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "read_probe",
      [](int64_t data, int64_t count) {
        return kernels().read_probe(reinterpret_cast<const float*>(data), count);
      },
      "data"_a, "count"_a, nb::call_guard<nb::gil_scoped_release>());
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
