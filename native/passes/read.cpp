#include "machine/cpu.h"
#include "passes/passes.h"

namespace regard {

constexpr int64_t kPieceBytes = 1 << 20;  // read by one thread

void read_once(const std::vector<Block>& blocks, int threads) {
  std::vector<Block> pieces;
  for (const auto& [address, bytes] : blocks)
    for (int64_t at = 0; at < bytes; at += kPieceBytes)
      pieces.push_back({address + at, std::min(kPieceBytes, bytes - at)});
  Stopper stopper({});
  run_tasks(threads, static_cast<int64_t>(pieces.size()), stopper, [&](int64_t i, int) {
    const auto [address, bytes] = pieces[i];
    kernels().read_probe(reinterpret_cast<const float*>(address), bytes / 4);
  });
}

}  // namespace regard
