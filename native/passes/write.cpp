#include "passes/write.h"

#include <algorithm>
#include <atomic>

#include "machine/cpu.h"
#include "machine/parallel.h"

namespace regard {
namespace {

constexpr int64_t kInlineNumbers = 1 << 19;  // not worth a second thread

class Writer {
 public:
  Writer(const Write& w, const std::vector<int64_t>& starts, const std::vector<int64_t>& counts)
      : w_(w), starts_(starts), counts_(counts), kernel_(kernels().write[w.dtype].rows) {}

  Outcome run() {
    int64_t numbers = 0;
    for (const int64_t count : counts_) numbers += count * w_.H * w_.sides[0].width;
    const int64_t most = numbers < kInlineNumbers ? 1 : std::min<int64_t>(threads(), w_.B * w_.H);
    parallel(static_cast<int>(most), work, this);
    return wrong_page_ ? Outcome::kWrongPage : Outcome::kDone;
  }

 private:
  static void work(int, void* self) {
    Writer& w = *static_cast<Writer*>(self);
    for (int64_t i; (i = w.next_.fetch_add(1)) < w.w_.B * w.w_.H;)
      for (const Side& side : w.w_.sides) w.head(side, i / w.w_.H, i % w.w_.H);
  }

  // Rows of one head, as many at once as lie in one page.
  void head(const Side& side, int64_t b, int64_t h) {
    const int64_t item = w_.dtype == kFloat64 ? 8 : w_.dtype == kFloat32 ? 4 : 2;
    const int64_t kept = w_.store == kFloats ? item : 1;
    const char* source = static_cast<const char*>(side.source) + (b * side.from.b + h * side.from.h) * item;
    for (int64_t done = 0, n; done < counts_[b]; done += n) {
      const int64_t at = starts_[b] + done, row = w_.table ? at & (w_.page - 1) : at;
      n = w_.table ? std::min(w_.page - row, counts_[b] - done) : counts_[b];
      const int64_t outer = w_.table ? w_.table[b * w_.table_stride + at / w_.page] : b;
      if (w_.table && (outer < 0 || outer >= w_.pages)) {
        wrong_page_ = true;
        return;
      }
      char* target =
          static_cast<char*>(side.target) + (outer * side.to.b + h * side.to.h + row * side.to.l) * kept;
      char* scales = static_cast<char*>(side.scales) +
                     2 * (outer * side.scale.b + h * side.scale.h + row * side.scale.l);
      kernel_({w_.store, n, side.width, source + done * side.from.l * item, side.from.l, side.from.d, target,
               side.to.l, scales, side.scale.l});
    }
  }

  const Write& w_;
  const std::vector<int64_t>&starts_, &counts_;
  void (*kernel_)(const NewRows&);
  std::atomic<int64_t> next_{0};
  std::atomic<bool> wrong_page_{false};
};

}  // namespace

Outcome write(const Write& write, const std::vector<int64_t>& starts, const std::vector<int64_t>& counts) {
  return Writer(write, starts, counts).run();
}

}  // namespace regard
