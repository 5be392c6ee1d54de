#include "machine/cpu.h"
#include "passes/passes.h"

namespace regard {

constexpr int64_t kPieceBytes = 1 << 20;  // read by one thread, as a head's keys are

void read_once(const std::vector<Bytes>& blocks, int threads) {
  std::vector<Bytes> pieces;
  for (const Bytes& block : blocks)
    for (int64_t at = 0; at < block.size; at += kPieceBytes)
      pieces.push_back({block.data + at, std::min(kPieceBytes, block.size - at)});
  Stopper stopper({});
  run_tasks(threads, static_cast<int64_t>(pieces.size()), stopper, [&](int64_t i, int) {
    kernels().read_probe(reinterpret_cast<const float*>(pieces[i].data), pieces[i].size / 4);
  });
}

}  // namespace regard
