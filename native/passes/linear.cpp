#include "machine/cpu.h"
#include "passes/passes.h"

namespace regard {
namespace {

constexpr double kInlineWork = 1e6;  // floating point operations that are not worth a second thread

// What is about to be written. Gradients are contiguous.
void ask_for_pages(const LinearSpec& spec, const LinearCall& call, const LinearGradients* grads) {
  const int64_t tokens = spec.B * spec.L * item_bytes(spec.dtype);
  if (!grads) return ask_for_large_pages(call.out, tokens * spec.Hq * spec.Dv);
  ask_for_large_pages(grads->dq, tokens * spec.Hq * spec.D);
  ask_for_large_pages(grads->dk, tokens * spec.Hkv * spec.D);
  ask_for_large_pages(grads->dv, tokens * spec.Hkv * spec.Dv);
}

// A task is one head of K and V with its query heads: the state passes from token to token.
Outcome run(const LinearSpec& spec, const LinearCall& call, const LinearGradients* grads,
            Interrupt interrupt) {
  const LinearKernels& kernels =
      (grads ? regard::kernels().linear_gradients : regard::kernels().linear)[spec.dtype];
  const double pairs = static_cast<double>(spec.B * (spec.Hq + spec.Hkv) * spec.L);
  const double work = 2 * pairs * static_cast<double>(spec.D) * static_cast<double>(spec.Dv);
  const int64_t tasks = spec.B * spec.Hkv;
  std::vector<void*> rooms(work < kInlineWork ? 1 : std::min<int64_t>(threads(), tasks));
  for (size_t i = 0; i < rooms.size(); ++i) rooms[i] = scratch(i, kernels.scratch_bytes(spec));
  ask_for_pages(spec, call, grads);
  Stopper stopper(interrupt);
  each_task(static_cast<int>(rooms.size()), tasks, stopper, [&](int64_t i, int worker) {
    kernels.run({&spec, &call, grads, i / spec.Hkv, i % spec.Hkv, rooms[worker], Stopper::ask, &stopper});
  });
  return stopper.outcome();
}

}  // namespace

Outcome linear_forward(const LinearSpec& spec, const LinearCall& call, Interrupt interrupt) {
  return run(spec, call, nullptr, interrupt);
}

Outcome linear_backward(const LinearSpec& spec, const LinearCall& call, const LinearGradients& grads,
                        Interrupt interrupt) {
  return run(spec, call, &grads, interrupt);
}

}  // namespace regard
