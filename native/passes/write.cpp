#include "passes/write.h"

#include "machine/cpu.h"

namespace regard {
namespace {

constexpr int64_t kInlineElements = 1 << 19;  // below this, one thread is faster

class Writer {
 public:
  Writer(const Write& w, const std::vector<int64_t>& starts, const std::vector<int64_t>& counts)
      : w_(w), starts_(starts), counts_(counts), kernel_(kernels().write[w.dtype]->rows) {}

  Outcome run() {
    int64_t elements = 0;
    for (const int64_t count : counts_) elements += count * w_.H * w_.sides[0].width;
    const int64_t workers = elements < kInlineElements ? 1 : std::min<int64_t>(threads(), w_.B * w_.H);
    Stopper stopper({});
    run_tasks(static_cast<int>(workers), w_.B * w_.H, stopper, [&](int64_t i, int) {
      for (const Side& side : w_.sides) write_head(side, i / w_.H, i % w_.H);
    });
    return wrong_page_ ? Outcome::kWrongPage : Outcome::kDone;
  }

 private:
  // Writes one head's rows; in paged storage, page by page.
  void write_head(const Side& side, int64_t b, int64_t h) {
    const Strides &from = side.source_stride, &to = side.target_stride, &scale = side.scale_stride;
    const int64_t item = item_bytes(w_.dtype), stored_item = w_.store == kFloats ? item : 1;
    const char* source = static_cast<const char*>(side.source) + (b * from.b + h * from.h) * item;
    for (int64_t written = 0, n; written < counts_[b]; written += n) {
      const int64_t slot = starts_[b] + written, row = w_.table ? slot & (w_.page - 1) : slot;
      n = w_.table ? std::min(w_.page - row, counts_[b] - written) : counts_[b];
      // Without a table, each sample is a page of its own.
      const int64_t page = w_.table ? w_.table[b * w_.table_stride + slot / w_.page] : b;
      if (w_.table && (page < 0 || page >= w_.pages)) return wrong_page_.store(true);
      char* target = static_cast<char*>(side.target) + (page * to.b + h * to.h + row * to.l) * stored_item;
      char* scales = static_cast<char*>(side.scales) + 2 * (page * scale.b + h * scale.h + row * scale.l);
      kernel_({w_.store, n, side.width, source + written * from.l * item, from.l, from.d, target, to.l,
               scales, scale.l});
    }
  }

  const Write& w_;
  const std::vector<int64_t>&starts_, &counts_;
  void (*kernel_)(const NewRows&);
  std::atomic<bool> wrong_page_{false};
};

}  // namespace

Outcome write(const Write& write, const std::vector<int64_t>& starts, const std::vector<int64_t>& counts) {
  return Writer(write, starts, counts).run();
}

Outcome write_token(const Spec& s, const Call& c, const Token& token) {
  Write w{s.dtype, s.store, s.B, s.Hkv, c.table, c.table_stride, s.page, s.pages, {}};
  w.sides.push_back(
      {token.k, token.k_stride, const_cast<void*>(c.k), s.k, const_cast<void*>(c.k_scale), s.k_scale, s.D});
  if (token.v)
    w.sides.push_back({token.v, token.v_stride, const_cast<void*>(c.v), s.v, const_cast<void*>(c.v_scale),
                       s.v_scale, s.Dv});
  return write(w, std::vector<int64_t>(s.B, s.Lk - 1), std::vector<int64_t>(s.B, 1));
}

}  // namespace regard
