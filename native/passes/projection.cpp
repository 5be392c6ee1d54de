#include "machine/cpu.h"
#include "passes/passes.h"

namespace regard {
namespace {

constexpr int64_t kInlineBytes = 1 << 18;  // bytes of the weight: below this, one thread is faster
constexpr int64_t kBlock = 16;             // rows of the weight

struct Job {
  const Projection& p;
  const ProjectionKernels& kernels;
  const void* packed;
  int64_t blocks, workers;
};

// Computes contiguous columns of the output. Their number affects no result, because each element is
// computed by one thread in an order of its own.
void run_part(int worker, void* context) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t begin = job.blocks * worker / job.workers * kBlock;
  const int64_t end = std::min(job.blocks * (worker + 1) / job.workers * kBlock, job.p.width);
  job.kernels.run(job.p, job.packed, begin, end);
}

}  // namespace

void project(const Projection& p) {
  const ProjectionKernels& kernels = *regard::kernels().projection[p.dtype];
  void* packed = scratch(0, kernels.packed_bytes(p));
  kernels.pack(p, packed);
  const int64_t bytes = p.width * p.depth * item_bytes(p.dtype), blocks = ceil_div(p.width, kBlock);
  const int64_t workers = bytes < kInlineBytes ? 1 : std::min<int64_t>(threads(), blocks);
  Job job{p, kernels, packed, blocks, workers};
  parallel(static_cast<int>(workers), run_part, &job);
}

}  // namespace regard
