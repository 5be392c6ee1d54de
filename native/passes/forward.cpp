#include <algorithm>

#include "kernels/few.h"
#include "passes/pass.h"

namespace regard {
namespace {

constexpr int64_t kRows = 256;  // max. query rows of a task: more rows read (and copy) keys less often
constexpr int64_t kStateBytes = 256 << 10;  // of a task's panels: queries and sums must stay in L2
constexpr int64_t kTasksPerThread = 8;      // at least, so that all threads finish at about the same time
constexpr int64_t kTilesInTurn = 4;         // consecutive tasks process this many tiles of one head
constexpr size_t kManySpans = 1 << 12;      // in a tile; beyond that, a thread caches only one tile's spans
constexpr double kInlineWork = 1e6;         // floating point operations: below this, one thread is faster

// `count` consecutive panels, from panel `first_panel` on, of the query rows residue, residue + dilation, ...
struct Tile {
  int64_t residue, first_panel, count;
};

// The spans of a tile's panels, which a thread reuses for other heads and samples with the same mask.
struct CachedSpans {
  int64_t tile = -1, batch = -1, head = -1;
  std::vector<Spans> spans;
};

// A thread's state, which its tasks reuse.
struct Worker {
  void* scratch = nullptr;
  CachedSpans cached[kTilesInTurn];
  bool many_spans = false;  // then only one tile's spans are cached
  std::vector<Panel> panels;
};

// A task: one tile of `heads_` heads, from `head` on, of one sample.
struct TaskIndex {
  int64_t tile, batch, head;
};

class Forward : Pass {
 public:
  Forward(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt)
      : Pass(spec, call, code, interrupt), kernels_(kernels().forward[spec.dtype]) {
    panel_ = panel_rows(spec.dtype);
    sharing_heads_ = finder_.dilation_varies() ? 1 : group();
    max_panels_ = panels_in_cache();
    while (lay_out_tiles(), tasks() < kTasksPerThread * threads() && max_panels_ > 2) max_panels_ /= 2;
    copy_k_ = should_copy(spec.k, spec.D);
    copy_v_ = should_copy(spec.v, spec.Dv);
  }

  int64_t tasks() const { return tiles_ * spec_.B * head_sets_; }
  int64_t scratch_bytes() const { return kernels_.scratch_bytes(spec_, task_panels(), copy_k_, copy_v_); }

  int workers() const {
    const int64_t rows = spec_.Lq > panel_ / 4 ? ceil_div(spec_.Lq, panel_) * panel_ : 2 * spec_.Lq;
    const double work = 2.0 * static_cast<double>(spec_.B * spec_.Hq * rows) * static_cast<double>(spec_.Lk) *
                        static_cast<double>(spec_.D + spec_.Dv);
    return work < kInlineWork ? 1 : static_cast<int>(std::min<int64_t>(threads(), tasks()));
  }

  Outcome run() {
    if (tasks() == 0) return Outcome::kDone;
    advise_huge_pages(call_.out, spec_.B * spec_.Hq * spec_.Lq * spec_.Dv * item_bytes(spec_.dtype));
    workers_.resize(workers());
    for (size_t i = 0; i < workers_.size(); ++i) workers_[i].scratch = scratch(i, scratch_bytes());
    run_tasks(workers(), tasks(), stopper_, [&](int64_t i, int worker) { run(i, workers_[worker]); });
    return stopper_.outcome();
  }

 private:
  // Rows with a large stride map to the same cache sets. Copying them pays off if several panels
  // use the copy.
  bool should_copy(const Strides& s, int64_t width) const {
    return is_16_bit() || s.d != 1 || ((is_dilated() || s.l != width) && task_panels() >= 4);
  }

  // Returns how many panels fit in L2, at most kRows rows.
  int64_t panels_in_cache() const {
    const int64_t bytes = (spec_.D + spec_.Dv) * panel_ * (spec_.dtype == kFloat64 ? 8 : 4);
    return std::clamp<int64_t>(kStateBytes / std::max<int64_t>(bytes, 1), 1, kRows / panel_);
  }

  // Divides the query rows into tiles. A task has `heads_` heads of one group and up to `panels_per_head_`
  // consecutive panels of each.
  void lay_out_tiles() {
    heads_ = std::min<int64_t>(sharing_heads_, std::max<int64_t>(max_panels_, 1));
    while (sharing_heads_ % heads_) --heads_;
    head_sets_ = spec_.Hq / heads_;
    panels_per_head_ = std::max<int64_t>(1, max_panels_ / heads_);
    tiles_ = 0;
    layouts_.assign(finder_.dilation_varies() ? spec_.Hq : 1, {});
    for (size_t h = 0; h < layouts_.size(); ++h) {
      const int64_t step = finder_.dilation(static_cast<int64_t>(h));
      for (int64_t c = 0; c < std::min(step, spec_.Lq); ++c) {
        const int64_t panels = ceil_div(ceil_div(spec_.Lq - c, step), panel_);
        for (int64_t p = 0; p < panels; p += panels_per_head_)
          layouts_[h].push_back({c, p, std::min(panels_per_head_, panels - p)});
      }
      tiles_ = std::max(tiles_, static_cast<int64_t>(layouts_[h].size()));
    }
  }

  int task_panels() const { return static_cast<int>(heads_ * panels_per_head_); }

  // Orders the tasks. The last tiles come first: with a causal mask they have the most keys. kTilesInTurn
  // tiles of one head are consecutive, so that its keys stay in cache. The same tiles of the next head
  // follow, because its spans are often the same.
  TaskIndex task_index(int64_t index) const {
    const int64_t sets = spec_.B * head_sets_, end = tiles_ - index / (kTilesInTurn * sets) * kTilesInTurn;
    const int64_t in_turn = std::min(kTilesInTurn, end), inside = index % (kTilesInTurn * sets),
                  set = inside / in_turn;
    return {end - 1 - inside % in_turn, set / head_sets_, set % head_sets_ * heads_};
  }

  void run(int64_t index, Worker& w) {
    const TaskIndex at = task_index(index);
    const std::vector<Tile>& layout = layouts_[layouts_.size() > 1 ? at.head : 0];
    if (at.tile >= static_cast<int64_t>(layout.size())) return;
    const Tile& tile = layout[at.tile];
    const int64_t step = finder_.dilation(at.head);
    fill_panels(tile, at, step, w);
    Task t = task(at.batch, at.head, tile.residue, step, w.panels, w.scratch);
    t.copy_k = copy_k_, t.copy_v = copy_v_;
    kernels_.run(t);
  }

  // Lists the task's panels by row, then by head. Finds their spans unless the thread has them cached.
  void fill_panels(const Tile& tile, const TaskIndex& at, int64_t step, Worker& w) {
    const int64_t span_heads = finder_.varies_by_head() ? heads_ : 1;
    CachedSpans& cached = w.cached[w.many_spans ? 0 : at.tile % kTilesInTurn];
    const bool hit = claim(cached, at);
    cached.spans.resize(std::max<size_t>(cached.spans.size(), tile.count * span_heads));
    w.panels.clear();
    size_t span_count = 0;
    for (int64_t p = 0; p < tile.count; ++p) {
      const int64_t row = tile.residue + (tile.first_panel + p) * panel_ * step;
      const int rows = static_cast<int>(std::min<int64_t>(panel_, ceil_div(spec_.Lq - row, step)));
      for (int64_t h = 0; h < heads_; ++h) {
        Spans& spans = cached.spans[p * span_heads + (span_heads > 1 ? h : 0)];
        if (!hit && (h == 0 || span_heads > 1)) find_spans({at.batch, at.head + h, row, step, rows}, spans);
        w.panels.push_back({at.head + h, row, rows, spans.data(), static_cast<int64_t>(spans.size())});
        span_count += spans.size();
      }
    }
    w.many_spans |= span_count > kManySpans;
  }

  // Returns whether `cached` already holds the task's spans. If not, the caller must fill it with them.
  bool claim(CachedSpans& cached, const TaskIndex& at) const {
    const int64_t batch = finder_.varies_by_batch() ? at.batch : 0,
                  head = finder_.varies_by_head() ? at.head : 0;
    const bool same = cached.tile == at.tile && cached.batch == batch && cached.head == head;
    cached.tile = at.tile, cached.batch = batch, cached.head = head;
    return same;
  }

  const ForwardKernels& kernels_;
  int panel_;
  // sharing_heads_: heads that may share a task; max_panels_: limit of panels in a task; head_sets_: Hq /
  // heads_; tiles_: length of the longest layout.
  int64_t sharing_heads_, max_panels_, heads_ = 1, head_sets_ = 0, panels_per_head_ = 1, tiles_ = 0;
  bool copy_k_ = false, copy_v_ = false;
  std::vector<std::vector<Tile>> layouts_;  // of each head if the dilation varies by head, otherwise of all
  std::vector<Worker> workers_;
};

}  // namespace

Outcome forward(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt) {
  if (is_empty(spec)) return Outcome::kDone;
  // If backward follows and computes the scores in panels, use panels: both must get the same weights.
  if (decodes(spec) && (!call.stats || spec.Lq <= kFewRows)) return decode(spec, call, code, interrupt);
  return Forward(spec, call, code, interrupt).run();
}

Outcome count_pairs(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt, Cost& cost) {
  // A decode step processes all its query rows together.
  const int panel = decodes(spec) ? static_cast<int>(std::max<int64_t>(spec.Lq, 1)) : panel_rows(spec.dtype);
  Stopper stopper(interrupt);
  cost = measure(SpanFinder(code, spec, call), spec, panel, Stopper::poll, &stopper);
  return stopper.outcome();
}

Outcome plan_tasks(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt,
                   TaskPlan& plan) {
  plan = {0, 0, 1};
  if (is_empty(spec)) return Outcome::kDone;
  if (decodes(spec)) return plan_decode(spec, call, code, interrupt, plan);
  const Forward pass(spec, call, code, interrupt);
  plan = {pass.tasks(), pass.scratch_bytes(), pass.workers()};
  return Outcome::kDone;
}

}  // namespace regard
