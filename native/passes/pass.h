// The base class of the passes that take a mask program.
#pragma once
#include "machine/cpu.h"
#include "mask/spans.h"
#include "passes/passes.h"

namespace regard {

inline bool is_empty(const Spec& spec) { return spec.B * spec.Hq * spec.Lq == 0; }

class Pass {
 protected:
  Pass(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt)
      : spec_(spec), call_(call), finder_(code, spec, call), stopper_(interrupt) {}

  // Query heads per key head.
  int64_t group() const { return spec_.Hq / spec_.Hkv; }
  bool is_16_bit() const { return item_bytes(spec_.dtype) == 2; }
  // Returns whether rows of K or V must be converted: 16-bit numbers to the compute type, or, if they
  // are multiplied in pairs, rows that are not whole words.
  bool must_convert(const void* data, const Strides& s, int64_t width) const {
    if (!multiplies_pairs(spec_.dtype)) return is_16_bit();
    return (reinterpret_cast<uintptr_t>(data) / 2 | s.b | s.h | s.l | width) & 1;
  }
  bool is_dilated() const { return finder_.dilation_varies() || finder_.dilation(0) > 1; }

  // Finds the rows' spans. Writes none if a signal has stopped the call: its results are not used.
  void find_spans(const Rows& rows, Spans& spans) {
    if (Stopper::poll(&stopper_)) return spans.clear();
    finder_.find(rows, spans);
  }

  // Makes a kernel task of panels whose rows are row, row + step, ... of a head and of heads in its group.
  Task task(int64_t batch, int64_t head, int64_t row, int64_t step, const std::vector<Panel>& panels,
            void* scratch) {
    Task t{};
    t.spec = &spec_, t.call = &call_;
    t.batch = batch, t.kv_head = head / group();
    t.row_step = t.key_step = step;
    t.key = finder_.first_key({batch, head, row, step, 1});
    t.panels = panels.data(), t.n_panels = static_cast<int>(panels.size());
    t.scratch = scratch;
    t.stop = Stopper::poll, t.stop_context = &stopper_;
    return t;
  }

  const Spec& spec_;
  const Call& call_;
  SpanFinder finder_;
  Stopper stopper_;
};

}  // namespace regard
