#include "machine/cpu.h"
#include "passes/passes.h"

namespace regard {
namespace {

constexpr double kInlineWork = 1e6;  // floating point operations: below this, one thread is faster

// Requests huge pages for the outputs. Gradients are contiguous.
void advise_outputs(const LinearSpec& spec, const LinearCall& call, const LinearGradients* grads) {
  const int64_t channel_bytes = spec.B * spec.L * item_bytes(spec.dtype);
  if (!grads) return advise_huge_pages(call.out, channel_bytes * spec.Hq * spec.Dv);
  advise_huge_pages(grads->dq, channel_bytes * spec.Hq * spec.D);
  advise_huge_pages(grads->dk, channel_bytes * spec.Hkv * spec.D);
  advise_huge_pages(grads->dv, channel_bytes * spec.Hkv * spec.Dv);
}

// Runs a task for each key head with its query heads. A head is not divided further, because the
// state is passed from token to token.
Outcome run(const LinearSpec& spec, const LinearCall& call, const LinearGradients* grads,
            Interrupt interrupt) {
  const LinearKernels& kernels =
      *(grads ? regard::kernels().linear_gradients : regard::kernels().linear)[spec.dtype];
  const double updates = static_cast<double>(spec.B * (spec.Hq + spec.Hkv) * spec.L);
  const double work = 2 * updates * static_cast<double>(spec.D) * static_cast<double>(spec.Dv);
  const int64_t tasks = spec.B * spec.Hkv;
  std::vector<void*> buffers(work < kInlineWork ? 1 : std::min<int64_t>(threads(), tasks));
  for (size_t i = 0; i < buffers.size(); ++i) buffers[i] = scratch(i, kernels.scratch_bytes(spec));
  advise_outputs(spec, call, grads);
  Stopper stopper(interrupt);
  run_tasks(static_cast<int>(buffers.size()), tasks, stopper, [&](int64_t i, int worker) {
    kernels.run({&spec, &call, grads, i / spec.Hkv, i % spec.Hkv, buffers[worker], Stopper::poll, &stopper});
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
