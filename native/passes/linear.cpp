#include "passes/linear.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "machine/cpu.h"
#include "machine/parallel.h"

namespace regard {
namespace {

constexpr double kInlineWork = 1e6;  // floating point operations that are not worth a second thread

// A task is one head of K and V with its query heads: the state passes from token to token.
class Linear {
 public:
  Linear(const LinearSpec& spec, const LinearCall& call, const LinearGradients* grads, Interrupt interrupt)
      : spec_(spec), call_(call), grads_(grads),
        kernels_((grads ? kernels().linear_gradients : kernels().linear)[spec.dtype]), stopper_(interrupt) {}

  Outcome run() {
    if (tasks() == 0) return Outcome::kDone;
    const int64_t bytes = kernels_.scratch_bytes(spec_);
    scratch_.resize(workers());
    for (size_t i = 0; i < scratch_.size(); ++i)
      if (!(scratch_[i] = scratch(static_cast<int>(i), bytes))) return Outcome::kOutOfMemory;
    ask_for_pages();
    parallel(static_cast<int>(scratch_.size()), work, this);
    return stopper_.outcome();
  }

 private:
  int64_t tasks() const { return spec_.B * spec_.Hkv; }

  // What is about to be written. Gradients are contiguous.
  void ask_for_pages() const {
    const int64_t tokens = spec_.B * spec_.L * item_bytes(spec_.dtype);
    if (!grads_) return ask_for_large_pages(call_.out, tokens * spec_.Hq * spec_.Dv);
    ask_for_large_pages(grads_->dq, tokens * spec_.Hq * spec_.D);
    ask_for_large_pages(grads_->dk, tokens * spec_.Hkv * spec_.D);
    ask_for_large_pages(grads_->dv, tokens * spec_.Hkv * spec_.Dv);
  }

  int workers() const {
    const double pairs = static_cast<double>(spec_.B * (spec_.Hq + spec_.Hkv) * spec_.L);
    const double work = 2 * pairs * static_cast<double>(spec_.D) * static_cast<double>(spec_.Dv);
    return work < kInlineWork ? 1 : static_cast<int>(std::min<int64_t>(threads(), tasks()));
  }

  static void work(int worker, void* self) {
    Linear& l = *static_cast<Linear*>(self);
    for (int64_t i; (i = l.next_.fetch_add(1)) < l.tasks() && !l.stopper_.stopped();) {
      const LinearTask task{&l.spec_,        &l.call_,           l.grads_,     i / l.spec_.Hkv,
                            i % l.spec_.Hkv, l.scratch_[worker], Stopper::ask, &l.stopper_};
      l.kernels_.run(task);
    }
  }

  const LinearSpec& spec_;
  const LinearCall& call_;
  const LinearGradients* grads_;
  const LinearKernels& kernels_;
  std::vector<void*> scratch_;
  Stopper stopper_;
  std::atomic<int64_t> next_{0};
};

}  // namespace

Outcome linear_forward(const LinearSpec& spec, const LinearCall& call, Interrupt interrupt) {
  return Linear(spec, call, nullptr, interrupt).run();
}

Outcome linear_backward(const LinearSpec& spec, const LinearCall& call, const LinearGradients& grads,
                        Interrupt interrupt) {
  return Linear(spec, call, &grads, interrupt).run();
}

}  // namespace regard
