// A checked call of attention, as a Python object.
#pragma once
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "bind/fields.h"
#include "mask/spans.h"
#include "passes/passes.h"
#include "passes/write.h"

namespace regard {

inline bool signal_pending() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

inline constexpr Interrupt kInterrupt{signal_pending};

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

inline Call make_call(const Operands& operands, int64_t q, int64_t k, int64_t v, int64_t offset) {
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

  // `stats` and `residual` are 0 unless backward follows.
  void forward(int64_t q, int64_t k, int64_t v, int64_t out, int64_t lse, int64_t stats, int64_t residual,
               int64_t offset, const Operands& operands) const {
    Call call = make_call(operands, q, k, v, offset);
    set(call.out, out), set(call.lse, lse), set(call.stats, stats), set(call.residual, residual);
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

}  // namespace regard
