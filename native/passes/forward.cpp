#include <algorithm>

#include "passes/pass.h"

namespace regard {
namespace {

constexpr int64_t kRows = 256;  // query rows of a task: the more, the less often keys are read (and copied)
constexpr int64_t kStateBytes = 256 << 10;  // of a task's panels, so that they stay in L2
constexpr int64_t kEnoughTasks = 8;         // of each thread, so that all end at about the same time
constexpr int64_t kTogether = 4;            // tiles of one head that are handed out in a row
constexpr size_t kManyRuns = 1 << 12;  // of a tile: keeping those of several tiles would take too much memory
constexpr double kInlineWork = 1e6;    // floating point operations that are not worth a second thread

// Neighbouring panels of one residue class of query rows.
struct Tile {
  int64_t residue, first, count;
};

// The spans of a tile's panels, which tasks of other heads can use again.
struct Known {
  int64_t tile = -1, batch = -1, head = -1;
  std::vector<Spans> spans;
};

// What a thread keeps between tasks.
struct Worker {
  void* scratch = nullptr;
  Known known[kTogether];
  bool long_lists = false;  // then only one tile's spans are kept
  std::vector<Panel> panels;
};

// Which queries a task has: a tile of `heads` heads from `head` on.
struct Place {
  int64_t tile, batch, head;
};

class Forward : Pass {
 public:
  Forward(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt)
      : Pass(spec, call, code, interrupt), kernels_(kernels().forward[spec.dtype]) {
    panel_ = panel_rows(spec.dtype);
    shared_ = finder_.dilation_varies() ? 1 : group();
    width_ = first_width();
    while (lay_tiles(), tasks() < kEnoughTasks * threads() && width_ > 2) width_ /= 2;
    copy_k_ = copies(spec.k, spec.D);
    copy_v_ = copies(spec.v, spec.Dv);
  }

  int64_t tasks() const { return tiles_ * spec_.B * head_sets_; }
  int64_t scratch_bytes() const { return kernels_.scratch_bytes(spec_, most_panels(), copy_k_, copy_v_); }

  int workers() const {
    const int64_t rows = spec_.Lq > panel_ / 4 ? ceil_div(spec_.Lq, panel_) * panel_ : 2 * spec_.Lq;
    const double work = 2.0 * static_cast<double>(spec_.B * spec_.Hq * rows) * static_cast<double>(spec_.Lk) *
                        static_cast<double>(spec_.D + spec_.Dv);
    return work < kInlineWork ? 1 : static_cast<int>(std::min<int64_t>(threads(), tasks()));
  }

  Outcome run() {
    if (tasks() == 0) return Outcome::kDone;
    ask_for_large_pages(call_.out, spec_.B * spec_.Hq * spec_.Lq * spec_.Dv * item_bytes(spec_.dtype));
    workers_.resize(workers());
    for (size_t i = 0; i < workers_.size(); ++i) workers_[i].scratch = scratch(i, scratch_bytes());
    each_task(workers(), tasks(), stopper_, [&](int64_t i, int worker) { run(i, workers_[worker]); });
    return stopper_.outcome();
  }

 private:
  // Rows far apart fall on the same cache sets: copying them pays when several panels share the copy.
  bool copies(const Strides& s, int64_t width) const {
    return narrow() || s.d != 1 || ((dilated() || s.l != width) && most_panels() >= 4);
  }

  int64_t first_width() const {
    const int64_t bytes = (spec_.D + spec_.Dv) * panel_ * (spec_.dtype == kFloat64 ? 8 : 4);
    return std::clamp<int64_t>(kStateBytes / std::max<int64_t>(bytes, 1), 1, kRows / panel_);
  }

  // A task has `heads_` heads of one group and `span_` neighbouring panels of each.
  void lay_tiles() {
    heads_ = std::min<int64_t>(shared_, std::max<int64_t>(width_, 1));
    while (shared_ % heads_) --heads_;
    head_sets_ = spec_.Hq / heads_;
    span_ = std::max<int64_t>(1, width_ / heads_);
    tiles_ = 0;
    layouts_.assign(finder_.dilation_varies() ? spec_.Hq : 1, {});
    for (size_t h = 0; h < layouts_.size(); ++h) {
      const int64_t step = finder_.dilation(static_cast<int64_t>(h));
      for (int64_t c = 0; c < std::min(step, spec_.Lq); ++c) {
        const int64_t panels = ceil_div(ceil_div(spec_.Lq - c, step), panel_);
        for (int64_t p = 0; p < panels; p += span_)
          layouts_[h].push_back({c, p, std::min(span_, panels - p)});
      }
      tiles_ = std::max(tiles_, static_cast<int64_t>(layouts_[h].size()));
    }
  }

  int most_panels() const { return static_cast<int>(heads_ * span_); }

  // The last tiles first: with a causal mask they are the longest. A few tiles of one head follow each other,
  // so that its keys stay in the cache, then the same tiles of the next head, whose spans are mostly the
  // same.
  Place place(int64_t index) const {
    const int64_t sets = spec_.B * head_sets_, base = tiles_ - index / (kTogether * sets) * kTogether;
    const int64_t together = std::min(kTogether, base), inside = index % (kTogether * sets),
                  set = inside / together;
    return {base - 1 - inside % together, set / head_sets_, set % head_sets_ * heads_};
  }

  void run(int64_t index, Worker& w) {
    const Place at = place(index);
    const std::vector<Tile>& layout = layouts_[layouts_.size() > 1 ? at.head : 0];
    if (at.tile >= static_cast<int64_t>(layout.size())) return;
    const Tile& tile = layout[at.tile];
    const int64_t step = finder_.dilation(at.head);
    fill_panels(tile, at, step, w);
    Task t = task(at.batch, at.head, tile.residue, step, w.panels, w.scratch);
    t.copy_k = copy_k_, t.copy_v = copy_v_;
    kernels_.run(t);
  }

  // Position by position, with the heads inside. Spans are derived where this thread does not know them yet.
  void fill_panels(const Tile& tile, const Place& at, int64_t step, Worker& w) {
    const int64_t distinct = finder_.varies_by_head() ? heads_ : 1;
    Known& known = w.known[w.long_lists ? 0 : at.tile % kTogether];
    const bool again = recall(known, at);
    known.spans.resize(std::max<size_t>(known.spans.size(), tile.count * distinct));
    w.panels.clear();
    size_t total = 0;
    for (int64_t p = 0; p < tile.count; ++p) {
      const int64_t row = tile.residue + (tile.first + p) * panel_ * step;
      const int rows = static_cast<int>(std::min<int64_t>(panel_, ceil_div(spec_.Lq - row, step)));
      for (int64_t h = 0; h < heads_; ++h) {
        Spans& spans = known.spans[p * distinct + (distinct > 1 ? h : 0)];
        if (!again && (h == 0 || distinct > 1)) finder_.find({at.batch, at.head + h, row, step, rows}, spans);
        w.panels.push_back({at.head + h, row, rows, spans.data(), static_cast<int64_t>(spans.size())});
        total += spans.size();
      }
    }
    w.long_lists |= total > kManyRuns;
  }

  // True when the spans at hand are this place's; otherwise they are about to be.
  bool recall(Known& known, const Place& at) const {
    const int64_t batch = finder_.varies_by_batch() ? at.batch : 0,
                  head = finder_.varies_by_head() ? at.head : 0;
    const bool same = known.tile == at.tile && known.batch == batch && known.head == head;
    known.tile = at.tile, known.batch = batch, known.head = head;
    return same;
  }

  const ForwardKernels& kernels_;
  int panel_;
  int64_t shared_, width_, heads_ = 1, head_sets_ = 0, span_ = 1, tiles_ = 0;
  bool copy_k_ = false, copy_v_ = false;
  std::vector<std::vector<Tile>> layouts_;
  std::vector<Worker> workers_;
};

}  // namespace

Outcome forward(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt) {
  if (is_empty(spec)) return Outcome::kDone;
  // Not for backward, which computes scores as panels do: the weights must come out the same.
  if (decodes(spec) && !call.stats) return decode(spec, call, code, interrupt);
  return Forward(spec, call, code, interrupt).run();
}

int rows_together(const Spec& spec) {
  return decodes(spec) ? static_cast<int>(std::max<int64_t>(spec.Lq, 1)) : panel_rows(spec.dtype);
}

Cut cut(const Spec& spec, const Call& call, const Ints& code) {
  if (is_empty(spec)) return {0, 0, 1};
  if (decodes(spec)) return cut_decode(spec, call, code);
  const Forward f(spec, call, code, {});
  return {f.tasks(), f.scratch_bytes(), f.workers()};
}

}  // namespace regard
