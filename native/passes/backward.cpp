#include <sched.h>
#include <string.h>

#include <memory>
#include <numeric>

#include "passes/pass.h"

namespace regard {
namespace {

constexpr int64_t kMostBytes = 1 << 20, kEnoughBytes = 256 << 10;  // of a chunk's sums
constexpr int64_t kEnoughUnits = 16;    // of one sample: beyond that, larger chunks are better
constexpr int64_t kRowsTogether = 256;  // rows of a task that only prepares rows
constexpr double kInlineWork = 1e6;     // floating point operations that are not worth a second thread

constexpr int64_t kShares = 1 << 17;  // doubles for shares of dby_head
constexpr int64_t kSweep = 1 << 18;   // bytes to clear or numbers to round at a time

int64_t modulo(int64_t a, int64_t b) { return (a % b + b) % b; }

// How the keys and queries of one key head are cut. With a dilated mask keys and rows fall into classes that
// do not meet; everything else has one class.
struct Layout {
  int64_t step, classes, chunk, chunks, tiles;
  int64_t marks_at;  // first word of its marks
  int64_t turns_at;  // first of its turns
};

// One chunk of keys of one key head of one sample.
struct Unit {
  int64_t batch, kv_head, of_class, chunk;
};

class Backward : Pass {
 public:
  Backward(const Spec& spec, const Call& call, const Gradients& grads, const Ints& code, Interrupt interrupt)
      : Pass(spec, call, code, interrupt), grads_(grads), masked_(!code.empty()),
        kernels_(kernels().backward[spec.dtype]) {
    panel_ = panel_rows(spec.dtype);
    heads_ = spec.B * spec.Hkv;
    columns_ = spec.bias == kRelative ? call.distances : 1;
    lay_out();
    workers_ = work() < kInlineWork ? 1 : threads();
  }

  Outcome run() {
    take_memory();
    clear_bias();
    prepare_rows();
    sum_marked_keys();
    if (spec_.Lk > 0) {
      if (masked_) mark_tiles();
      if (grads_.dq || grads_.dk || grads_.dv || grads_.dby_head ||
          (grads_.dbias && !bias_is_shared(spec_, grads_)))
        run_units();
      if (grads_.dbias && bias_is_shared(spec_, grads_)) sum_bias();
    }
    for (size_t i = 0; i < by_head_.size(); ++i) put(grads_.dby_head, static_cast<int64_t>(i), by_head_[i]);
    if (!stopper_.stopped()) add_marked_rows();
    if (rounds()) round_queries();
    return stopper_.outcome();
  }

 private:
  void take_memory() {
    const int64_t rows = spec_.B * spec_.Hq * spec_.Lq, size = item_bytes(compute_type());
    own_.reset(new char[rows * size * (1 + (rounds() ? spec_.D : 0))]);
    grads_.delta = own_.get();
    grads_.dq_sum = rounds() ? own_.get() + rows * size : grads_.dq;
    const int64_t bytes = kernels_.scratch_bytes(spec_, grads_, largest_chunk(), copies(spec_.k, spec_.D),
                                                 copies(spec_.v, spec_.Dv));
    for (int i = 0; i < workers_; ++i) scratches_.push_back(scratch(i, bytes));
  }

  bool rounds() const { return grads_.dq && spec_.dtype != compute_type(); }

  // Layout

  void lay_out() {
    int64_t marks = 0, turns = 0;
    for (int64_t h = 0; h < spec_.Hkv; ++h) {
      Layout at{};
      at.step = finder_.dilation(h * group());
      for (int64_t g = 1; g < group(); ++g) at.step = std::gcd(at.step, finder_.dilation(h * group() + g));
      cut(at);
      const bool same = h > 0 && !finder_.varies_by_head();
      at.marks_at = same ? layouts_.back().marks_at : marks;
      at.turns_at = turns;
      if (!same) marks += (finder_.varies_by_batch() ? spec_.B : 1) * at.classes * at.tiles * words(at);
      turns += spec_.B * at.classes * at.tiles;
      layouts_.push_back(at);
      units_ = std::max(units_, at.classes * at.chunks);
    }
    marks_.resize(masked_ ? marks : 0);
    turns_ = std::vector<std::atomic<int64_t>>(grads_.dq ? turns : 0);
    together_ = units_;
    if (!grads_.dby_head) return;
    by_head_.resize(spec_.Hq * columns_);
    const int64_t share = heads_ * group() * columns_;
    together_ = std::clamp<int64_t>(kShares / share, 1, units_);
    shares_.resize(together_ * share);
  }

  void cut(Layout& at) const {
    // Narrow keys and values are copied, too.
    const int64_t width = (spec_.D + spec_.Dv) * item_bytes(compute_type()) * (narrow() ? 2 : 1);
    const int64_t keys = std::max<int64_t>(ceil_div(spec_.Lk, at.step), 1);
    const auto chunks = [&](int64_t bytes) { return ceil_div(keys * width, bytes); };
    const int64_t wanted = std::min(ceil_div(kEnoughUnits, spec_.Hkv), chunks(kEnoughBytes));
    const int64_t count = std::max<int64_t>({wanted, chunks(kMostBytes), 1});
    at.classes = std::min(at.step, std::max<int64_t>(spec_.Lk, 1));
    at.chunk = ceil_div(ceil_div(keys, count), kBackwardBlock) * kBackwardBlock;
    at.chunks = ceil_div(keys, at.chunk);
    at.tiles = ceil_div(ceil_div(spec_.Lq, at.step), tile_rows());
  }

  int64_t tile_rows() const { return kTilePanels * panel_; }
  static int64_t words(const Layout& at) { return ceil_div(at.chunks, 64); }

  int64_t largest_chunk() const {
    Layout plain{};  // as sum_bias cuts it
    plain.step = 1;
    cut(plain);
    int64_t most = plain.chunk;
    for (const Layout& at : layouts_) most = std::max(most, at.chunk);
    return most;
  }

  double work() const {
    return 5.0 * static_cast<double>(spec_.B * spec_.Hq * spec_.Lq) * static_cast<double>(spec_.Lk) *
           static_cast<double>(spec_.D + spec_.Dv);
  }

  bool copies(const Strides& s, int64_t width) const {
    return narrow() || s.d != 1 || s.l != width || layouts_[0].step > 1;
  }

  int64_t offset(int64_t batch) const { return call_.offsets ? call_.offsets[batch] : call_.offset; }

  // Running

  template <class Job>
  void each(int64_t count, Job job) {
    each_task(workers_, count, stopper_, job);
  }

  // PyTorch's own way to fill and convert spans on threads that hang in a forked child.
  void clear_bias() {
    if (!grads_.dbias) return;
    const Strides& s = grads_.dbias_stride;
    const int64_t count =
        (s.b ? spec_.B : 1) * (s.h ? spec_.Hq : 1) * (s.l ? spec_.Lq : 1) * (s.d ? spec_.Lk : 1);
    const bool pairs = bias_has_pairs(spec_, grads_);
    clear(grads_.dbias, count * item_bytes(narrow_pairs() ? spec_.bias_dtype
                                           : pairs        ? compute_type()
                                                          : kFloat64));
  }

  void clear(void* target, int64_t bytes) {
    each(ceil_div(bytes, kSweep), [&](int64_t i, int) {
      memset(static_cast<char*>(target) + i * kSweep, 0, std::min(kSweep, bytes - i * kSweep));
    });
  }

  void round_queries() {
    const int64_t count = spec_.B * spec_.Hq * spec_.Lq * spec_.D;
    each(ceil_div(count, kSweep), [&](int64_t i, int) {
      const int64_t at = i * kSweep;
      kernels_.round(static_cast<float*>(grads_.dq_sum) + at, static_cast<uint16_t*>(grads_.dq) + at,
                     std::min(kSweep, count - at));
    });
  }

  DType compute_type() const { return spec_.dtype == kFloat64 ? kFloat64 : kFloat32; }

  void prepare_rows() {
    const int64_t parts = ceil_div(spec_.Lq, kRowsTogether), heads = spec_.B * spec_.Hq;
    std::vector<double> shares(parts * heads);
    each(parts * heads, [&](int64_t i, int) {
      const int64_t begin = i % parts * kRowsTogether, end = std::min(begin + kRowsTogether, spec_.Lq);
      if (grads_.dq) clear_queries(i / parts * spec_.Lq + begin, end - begin);
      shares[i] = kernels_.rows(spec_, call_, grads_, i / parts / spec_.Hq, i / parts % spec_.Hq, begin, end);
    });
    for (int64_t h = 0; h < spec_.Hq && grads_.dsink; ++h) {
      double sum = 0;
      for (int64_t i = 0; i < parts * heads; ++i) sum += i / parts % spec_.Hq == h ? shares[i] : 0;
      put(grads_.dsink, h, sum);
    }
  }

  void clear_queries(int64_t first, int64_t count) {
    const int64_t row = spec_.D * item_bytes(compute_type());
    memset(static_cast<char*>(grads_.dq_sum) + first * row, 0, count * row);
  }

  void put(void* target, int64_t at, double x) const {
    if (spec_.dtype == kFloat64)
      static_cast<double*>(target)[at] = x;
    else
      static_cast<float*>(target)[at] = static_cast<float>(x);
  }

  // Long chunks of all heads first, so that those of one head are rarely under way together.
  Unit unit(int64_t index) const {
    const int64_t head = index % heads_, u = index / heads_, kv_head = head % spec_.Hkv;
    const int64_t classes = layouts_[kv_head].classes;
    return {head / spec_.Hkv, kv_head, u % classes, u / classes};
  }

  // The panels of a tile: rows of one class, in the step of the layout.
  struct Tile {
    int64_t batch, head, row, step, rows;
  };

  Tile tile_of(const Unit& u, const Layout& at, int64_t tile, int64_t head) const {
    const int64_t first = modulo(u.of_class - offset(u.batch), at.step) + tile * tile_rows() * at.step;
    const int64_t rows = first < spec_.Lq ? ceil_div(spec_.Lq - first, at.step) : 0;
    return {u.batch, head, first, at.step, std::min(rows, tile_rows())};
  }

  template <class Visit>
  void each_panel(const Tile& t, Visit visit) const {
    for (int64_t at = 0; at < t.rows; at += panel_) {
      const int rows = static_cast<int>(std::min<int64_t>(panel_, t.rows - at));
      visit(Rows{t.batch, t.head, t.row + at * t.step, t.step, rows});
    }
  }

  // Marks: which chunks does a tile of queries see at all?

  uint64_t* marks(const Unit& u, int64_t tile) {
    const Layout& at = layouts_[u.kv_head];
    const int64_t batch = finder_.varies_by_batch() ? u.batch : 0;
    return marks_.data() + at.marks_at + ((batch * at.classes + u.of_class) * at.tiles + tile) * words(at);
  }

  void mark_tiles() {
    const int64_t batches = finder_.varies_by_batch() ? spec_.B : 1;
    const int64_t heads = finder_.varies_by_head() ? spec_.Hkv : 1;
    int64_t most = 0;
    for (int64_t h = 0; h < heads; ++h) most = std::max(most, layouts_[h].classes * layouts_[h].tiles);
    each(batches * heads * most, [&](int64_t i, int) {
      const int64_t unit = i % most, kv_head = i / most % heads;
      const Layout& at = layouts_[kv_head];
      if (unit < at.classes * at.tiles)
        mark_tile({i / most / heads, kv_head, unit / at.tiles, 0}, at, unit % at.tiles);
    });
  }

  void mark_tile(const Unit& u, const Layout& at, int64_t tile) {
    if (Stopper::ask(&stopper_)) return;
    uint64_t* word = marks(u, tile);
    Spans spans;
    for (int64_t g = 0; g < (finder_.varies_by_head() ? group() : 1); ++g)
      each_panel(tile_of(u, at, tile, u.kv_head * group() + g), [&](const Rows& rows) {
        finder_.find(rows, spans);
        for (const Span& span : spans)
          for (int64_t c = span.begin / at.chunk; c <= (span.end - 1) / at.chunk; ++c)
            word[c / 64] |= uint64_t{1} << c % 64;
      });
  }

  bool sees(const Unit& u, int64_t tile, int64_t chunk) {
    return !masked_ || (marks(u, tile)[chunk / 64] >> chunk % 64 & 1);
  }

  // The last chunk before this one that the tile sees, or -1.
  int64_t chunk_before(const Unit& u, int64_t tile) {
    int64_t c = u.chunk - 1;
    while (c >= 0 && !sees(u, tile, c)) --c;
    return c;
  }

  // Units

  Chunk open(const Unit& u, const Layout& at, int worker) const {
    Chunk c{};
    c.spec = &spec_, c.call = &call_, c.grads = &grads_;
    c.batch = u.batch, c.kv_head = u.kv_head;
    c.row_step = c.key_step = at.step;
    c.key = u.of_class;
    c.begin = std::min(u.chunk * at.chunk, keys(u, at));
    c.end = std::min(c.begin + at.chunk, keys(u, at));
    c.copy_k = copies(spec_.k, spec_.D), c.copy_v = copies(spec_.v, spec_.Dv);
    c.scratch = scratches_[worker];
    return c;
  }

  int64_t keys(const Unit& u, const Layout& at) const { return ceil_div(spec_.Lk - u.of_class, at.step); }

  // All at once, unless their shares of dby_head would take too much room together.
  void run_units() {
    for (int64_t first = 0; first < units_ && !stopper_.stopped(); first += together_) {
      each(std::min(together_, units_ - first) * heads_,
           [&](int64_t i, int worker) { run_unit(unit(first * heads_ + i), i, worker); });
      if (grads_.dby_head) add_shares();
    }
  }

  // Tiles that no earlier chunk adds to come first, then those that may have to wait for their turn. The last
  // tile leads: with a causal mask all chunks see it.
  void run_unit(const Unit& u, int64_t share, int worker) {
    const Layout& at = layouts_[u.kv_head];
    if (u.chunk >= at.chunks) return;
    Chunk chunk = open(u, at, worker);
    if (grads_.dby_head) chunk.by_head = shares_.data() + share * group() * columns_;
    kernels_.open(chunk);
    for (const bool waits : {false, true})
      for (int64_t tile = at.tiles - 1; tile >= 0; --tile) {
        if (!sees(u, tile, u.chunk)) continue;
        const int64_t before = grads_.dq ? chunk_before(u, tile) : -1;
        if ((before >= 0) == waits && !run_tile(u, at, chunk, tile, before)) return;
      }
    kernels_.close(chunk);
  }

  // False when the call has been stopped.
  bool run_tile(const Unit& u, const Layout& at, const Chunk& chunk, int64_t tile, int64_t before) {
    if (Stopper::ask(&stopper_)) return false;
    Spans spans[kTilePanels];
    Panel panels[kTilePanels];
    std::atomic<int64_t>* turn =
        grads_.dq ? &turns_[at.turns_at + (u.batch * at.classes + u.of_class) * at.tiles + tile] : nullptr;
    for (int64_t g = 0; g < group(); ++g) {
      const int count = find_panels(tile_of(u, at, tile, u.kv_head * group() + g), chunk, spans, panels,
                                    g > 0 && !finder_.varies_by_head());
      kernels_.tile(chunk, panels, count);
      if (!turn) continue;
      if (g == 0 && !wait(*turn, before)) return false;
      kernels_.add_queries(chunk, panels, count);
    }
    if (turn) turn->store(u.chunk + 1, std::memory_order_release);
    return true;
  }

  int find_panels(const Tile& t, const Chunk& chunk, Spans* spans, Panel* panels, bool known) const {
    int count = 0;
    each_panel(t, [&](const Rows& rows) {
      if (!known) finder_.find(rows, chunk.begin, chunk.end, spans[count]);
      panels[count] = {rows.head, rows.row, rows.count, spans[count].data(),
                       static_cast<int64_t>(spans[count].size())};
      ++count;
    });
    return count;
  }

  // Until `chunk` has added its part to the tile. It was started earlier, so it gets there.
  bool wait(const std::atomic<int64_t>& turn, int64_t chunk) {
    for (int spins = 0; turn.load(std::memory_order_acquire) <= chunk; ++spins) {
      if (spins < 1000) continue;
      if (Stopper::ask(&stopper_)) return false;
      sched_yield();
    }
    return true;
  }

  // Sums that are made in a fixed order

  void add_shares() {
    const int64_t row = spec_.Hq * columns_;
    for (size_t i = 0; i < shares_.size(); ++i) by_head_[i % row] += shares_[i];
    std::fill(shares_.begin(), shares_.end(), 0.0);
  }

  // A broadcast bias: each task owns some elements of its gradient and visits all that was added to them.
  void sum_bias() {
    const Strides& s = grads_.dbias_stride;
    Layout at{};
    at.step = 1;
    cut(at);
    const int64_t batches = s.b ? spec_.B : 1, heads = s.h ? spec_.Hq : 1;
    const int64_t tiles = s.l ? at.tiles : 1, chunks = s.d ? at.chunks : 1;
    each(batches * heads * tiles * chunks, [&](int64_t i, int worker) {
      const int64_t chunk = i % chunks, tile = i / chunks % tiles, head = i / chunks / tiles % heads,
                    batch = i / chunks / tiles / heads;
      Gradients own = grads_;
      std::vector<float> sums;
      if (narrow_pairs()) sum_apart(own, sums, at, tile, chunk);
      for (int64_t b = s.b ? batch : 0; b < (s.b ? batch + 1 : spec_.B); ++b)
        for (int64_t h = s.h ? head : 0; h < (s.h ? head + 1 : spec_.Hq); ++h)
          for (int64_t c = s.d ? chunk : 0; c < (s.d ? chunk + 1 : at.chunks); ++c)
            add_bias({b, h / group(), 0, c}, at, own, h, s.l ? tile : 0, s.l ? tile + 1 : at.tiles, worker);
      if (narrow_pairs()) round_bias(sums, at, batch * s.b + head * s.h, tile, chunk);
    });
  }

  // A gradient of 16 bits that several pairs add to: summed in float, tile by tile, and rounded once.
  bool narrow_pairs() const { return bias_has_pairs(spec_, grads_) && item_bytes(spec_.bias_dtype) == 2; }

  void sum_apart(Gradients& own, std::vector<float>& sums, const Layout& at, int64_t tile,
                 int64_t chunk) const {
    sums.assign(tile_rows() * at.chunk, 0);
    own.dbias_stride = {0, 0, at.chunk, 1};
    own.dbias = sums.data() - (tile * tile_rows() + chunk) * at.chunk;
  }

  void round_bias(const std::vector<float>& sums, const Layout& at, int64_t first, int64_t tile,
                  int64_t chunk) {
    const Strides& s = grads_.dbias_stride;
    const int64_t row = tile * tile_rows(), key = chunk * at.chunk;
    const int64_t rows = std::min(tile_rows(), spec_.Lq - row), keys = std::min(at.chunk, spec_.Lk - key);
    for (int64_t i = 0; i < rows; ++i)
      kernels_.round(sums.data() + i * at.chunk,
                     static_cast<uint16_t*>(grads_.dbias) + first + (row + i) * s.l + key * s.d, keys);
  }

  void add_bias(const Unit& u, const Layout& at, const Gradients& grads, int64_t head, int64_t tile,
                int64_t end, int worker) {
    Chunk chunk = open(u, at, worker);
    chunk.grads = &grads;
    chunk.bias_only = true;
    kernels_.open(chunk);
    Spans spans[kTilePanels];
    Panel panels[kTilePanels];
    for (; tile < end && !Stopper::ask(&stopper_); ++tile) {
      const int count = find_panels(tile_of(u, at, tile, head), chunk, spans, panels, false);
      if (std::any_of(panels, panels + count, [](const Panel& p) { return p.n_spans > 0; }))
        kernels_.tile(chunk, panels, count);
    }
  }

  // Rows whose scores leave the compute type: one after the other, in double precision. First what they give
  // to keys, from where chunks start, then the rest.
  void sum_marked_keys() {
    if (!any_marked()) return;
    dk_exact_.resize(grads_.dk ? heads_ * spec_.Lk * spec_.D : 0);
    dv_exact_.resize(grads_.dv ? heads_ * spec_.Lk * spec_.Dv : 0);
    grads_.dk_exact = grads_.dk ? dk_exact_.data() : nullptr;
    grads_.dv_exact = grads_.dv ? dv_exact_.data() : nullptr;
    Gradients keys = grads_;
    keys.dq = keys.dbias = keys.dby_head = keys.dsink = nullptr;
    add_marked_rows(keys);
  }

  void add_marked_rows() {
    Gradients remaining = grads_;
    remaining.dk = remaining.dv = nullptr;
    if (any_marked()) add_marked_rows(remaining);
  }

  bool any_marked() const {
    const int64_t rows = spec_.B * spec_.Hq * spec_.Lq;
    bool any = false;
    for (int64_t i = 0; i < rows && !any; ++i) any = is_marked(rows + i);
    return any;
  }

  void add_marked_rows(const Gradients& grads) {
    const int64_t rows = spec_.B * spec_.Hq * spec_.Lq;
    Spans spans;
    for (int64_t i = 0; i < rows && !Stopper::ask(&stopper_); ++i)
      if (is_marked(rows + i))
        add_marked_row(i / spec_.Lq / spec_.Hq, i / spec_.Lq % spec_.Hq, i % spec_.Lq, grads, spans);
  }

  bool is_marked(int64_t at) const {
    return spec_.dtype == kFloat64 ? static_cast<const double*>(grads_.stats)[at] < 0
                                   : static_cast<const float*>(grads_.stats)[at] < 0;
  }

  void add_marked_row(int64_t batch, int64_t head, int64_t row, const Gradients& grads, Spans& spans) {
    finder_.find({batch, head, row, 1, 1}, spans);
    const Panel panel{head, row, 1, spans.data(), static_cast<int64_t>(spans.size())};
    kernels_.exact_row(task(batch, head, row, 1, {}, scratches_[0]), panel, grads);
  }

  Gradients grads_;
  const bool masked_;
  const BackwardKernels& kernels_;
  int panel_, workers_ = 1;
  int64_t heads_, columns_, units_ = 0, together_ = 0;
  std::vector<Layout> layouts_;
  std::vector<uint64_t> marks_;
  std::vector<std::atomic<int64_t>> turns_;  // how many chunks have been added to each tile's dq
  std::vector<double> shares_;   // of dby_head, by the units under way: [unit][sample][head][column]
  std::vector<double> by_head_;  // their sum: [head][column]
  std::vector<double> dk_exact_, dv_exact_;  // what marked rows give to keys
  std::unique_ptr<char[]> own_;              // delta, and dq's sum where dq itself cannot hold it
  std::vector<void*> scratches_;
};

}  // namespace

Outcome backward(const Spec& spec, const Call& call, const Gradients& grads, const Ints& code,
                 Interrupt interrupt) {
  if (is_empty(spec)) return Outcome::kDone;
  return Backward(spec, call, grads, code, interrupt).run();
}

}  // namespace regard
