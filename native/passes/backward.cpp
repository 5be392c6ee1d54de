#include <sched.h>
#include <string.h>

#include <memory>
#include <numeric>

#include "passes/pass.h"

namespace regard {
namespace {

constexpr int64_t kMaxChunkBytes = 1 << 20, kMinChunkBytes = 256 << 10;  // size of a chunk's dk and dv
constexpr int64_t kEnoughChunks = 16;   // in one sample: beyond this number, chunks become larger instead
constexpr int64_t kPreparedRows = 256;  // query rows per task of prepare_rows
constexpr double kInlineWork = 1e6;     // floating point operations: below this, one thread is faster

constexpr int64_t kMaxShares = 1 << 17;  // max. doubles in shares_
constexpr int64_t kGrain = 1 << 18;      // bytes to clear or elements to round in one task

int64_t modulo(int64_t a, int64_t b) { return (a % b + b) % b; }

// How the keys and queries of one key head are divided. With a dilated mask, rows and keys fall into residue
// classes modulo `step`, and a row attends only to keys of its class. Other masks have one class.
struct Layout {
  int64_t step, classes;
  int64_t chunk, chunks, tiles;  // keys per chunk; chunks and tiles of queries per class
  int64_t reach_at, turns_at;    // first index into reach_ and turns_
};

// Identifies one chunk of keys of one key head of one sample.
struct ChunkId {
  int64_t batch, kv_head, key_class, chunk;
};

class Backward : Pass {
 public:
  Backward(const Spec& spec, const Call& call, const Gradients& grads, const Ints& code, Interrupt interrupt)
      : Pass(spec, call, code, interrupt), grads_(grads), masked_(!code.empty()),
        kernels_(*kernels().backward[spec.dtype]) {
    panel_ = panel_rows(spec.dtype);
    kv_heads_ = spec.B * spec.Hkv;
    columns_ = spec.bias == kRelative ? call.distances : 1;
    lay_out();
    workers_ = work() < kInlineWork ? 1 : threads();
  }

  Outcome run() {
    allocate();
    clear_bias();
    prepare_rows();
    sum_exact_keys();
    if (spec_.Lk > 0) {
      if (masked_) find_reach();
      if (grads_.dq || grads_.dk || grads_.dv || grads_.dby_head ||
          (grads_.dbias && !bias_is_shared(spec_, grads_)))
        run_chunks();
      if (grads_.dbias && bias_is_shared(spec_, grads_)) sum_bias();
    }
    for (size_t i = 0; i < by_head_.size(); ++i) store(grads_.dby_head, static_cast<int64_t>(i), by_head_[i]);
    if (!stopper_.stopped()) add_exact_rows();
    if (rounds_dq()) round_dq();
    return stopper_.outcome();
  }

 private:
  void allocate() {
    const int64_t rows = spec_.B * spec_.Hq * spec_.Lq, size = item_bytes(compute_type());
    buffer_.reset(new char[rows * size * (1 + (rounds_dq() ? spec_.D : 0))]);
    grads_.delta = buffer_.get();
    grads_.dq_sum = rounds_dq() ? buffer_.get() + rows * size : grads_.dq;
    const int64_t bytes =
        kernels_.scratch_bytes(spec_, grads_, largest_chunk(), should_copy(call_.k, spec_.k, spec_.D),
                               should_copy(call_.v, spec_.v, spec_.Dv));
    for (int i = 0; i < workers_; ++i) scratches_.push_back(scratch(i, bytes));
  }

  bool rounds_dq() const { return grads_.dq && spec_.dtype != compute_type(); }

  // Layout: chunks of keys and tiles of queries

  void lay_out() {
    int64_t reach_words = 0, turns = 0;
    for (int64_t h = 0; h < spec_.Hkv; ++h) {
      Layout at{};
      at.step = finder_.dilation(h * group());
      for (int64_t g = 1; g < group(); ++g) at.step = std::gcd(at.step, finder_.dilation(h * group() + g));
      divide(at);
      const bool same = h > 0 && !finder_.varies_by_head();
      at.reach_at = same ? layouts_.back().reach_at : reach_words;
      at.turns_at = turns;
      if (!same) reach_words += (finder_.varies_by_batch() ? spec_.B : 1) * at.classes * at.tiles * words(at);
      turns += spec_.B * at.classes * at.tiles;
      layouts_.push_back(at);
      chunk_ids_ = std::max(chunk_ids_, at.classes * at.chunks);
    }
    reach_.resize(masked_ ? reach_words : 0);
    turns_ = std::vector<std::atomic<int64_t>>(grads_.dq ? turns : 0);
    ids_at_once_ = chunk_ids_;
    if (!grads_.dby_head) return;
    by_head_.resize(spec_.Hq * columns_);
    const int64_t share = kv_heads_ * group() * columns_;
    ids_at_once_ = std::clamp<int64_t>(kMaxShares / share, 1, chunk_ids_);
    shares_.resize(ids_at_once_ * share);
  }

  void divide(Layout& at) const {
    // 16-bit keys and values also need a copy in the compute type.
    const int64_t width = (spec_.D + spec_.Dv) * item_bytes(compute_type()) * (is_16_bit() ? 2 : 1);
    const int64_t keys = std::max<int64_t>(ceil_div(spec_.Lk, at.step), 1);
    const auto chunks = [&](int64_t bytes) { return ceil_div(keys * width, bytes); };
    const int64_t preferred = std::min(ceil_div(kEnoughChunks, spec_.Hkv), chunks(kMinChunkBytes));
    const int64_t count = std::max<int64_t>({preferred, chunks(kMaxChunkBytes), 1});
    at.classes = std::min(at.step, std::max<int64_t>(spec_.Lk, 1));
    at.chunk = ceil_div(ceil_div(keys, count), kBackwardBlock) * kBackwardBlock;
    at.chunks = ceil_div(keys, at.chunk);
    at.tiles = ceil_div(ceil_div(spec_.Lq, at.step), tile_rows());
  }

  int64_t tile_rows() const { return kTilePanels * panel_; }
  static int64_t words(const Layout& at) { return ceil_div(at.chunks, 64); }

  int64_t largest_chunk() const {
    Layout undilated{};  // sum_bias does not use residue classes
    undilated.step = 1;
    divide(undilated);
    int64_t largest = undilated.chunk;
    for (const Layout& at : layouts_) largest = std::max(largest, at.chunk);
    return largest;
  }

  double work() const {
    return 5.0 * static_cast<double>(spec_.B * spec_.Hq * spec_.Lq) * static_cast<double>(spec_.Lk) *
           static_cast<double>(spec_.D + spec_.Dv);
  }

  bool should_copy(const void* data, const Strides& s, int64_t width) const {
    return must_convert(data, s, width) || s.d != 1 || s.l != width || layouts_[0].step > 1;
  }

  int64_t offset(int64_t batch) const { return call_.offsets ? call_.offsets[batch] : call_.offset; }

  // Preparing and rounding

  template <class Job>
  void parallel_for(int64_t count, Job job) {
    run_tasks(workers_, count, stopper_, job);
  }

  // Zeroed here, not by PyTorch: its fill uses threads that hang in a forked child.
  void clear_bias() {
    if (!grads_.dbias) return;
    const Strides& s = grads_.dbias_stride;
    const int64_t count =
        (s.b ? spec_.B : 1) * (s.h ? spec_.Hq : 1) * (s.l ? spec_.Lq : 1) * (s.d ? spec_.Lk : 1);
    const bool pairs = bias_has_pairs(spec_, grads_);
    clear(grads_.dbias, count * item_bytes(has_16_bit_pairs() ? spec_.bias_dtype
                                           : pairs            ? compute_type()
                                                              : kFloat64));
  }

  void clear(void* target, int64_t bytes) {
    parallel_for(ceil_div(bytes, kGrain), [&](int64_t i, int) {
      memset(static_cast<char*>(target) + i * kGrain, 0, std::min(kGrain, bytes - i * kGrain));
    });
  }

  void round_dq() {
    const int64_t count = spec_.B * spec_.Hq * spec_.Lq * spec_.D;
    parallel_for(ceil_div(count, kGrain), [&](int64_t i, int) {
      const int64_t at = i * kGrain;
      kernels_.round(static_cast<float*>(grads_.dq_sum) + at, static_cast<uint16_t*>(grads_.dq) + at,
                     std::min(kGrain, count - at));
    });
  }

  DType compute_type() const { return spec_.dtype == kFloat64 ? kFloat64 : kFloat32; }

  // Zeroes dq_sum, computes delta and sums dsink.
  void prepare_rows() {
    const int64_t chunks = ceil_div(spec_.Lq, kPreparedRows), heads = spec_.B * spec_.Hq;
    std::vector<double> sums(chunks * heads);
    parallel_for(chunks * heads, [&](int64_t i, int) {
      const int64_t begin = i % chunks * kPreparedRows, end = std::min(begin + kPreparedRows, spec_.Lq);
      if (grads_.dq) clear_dq(i / chunks * spec_.Lq + begin, end - begin);
      sums[i] = kernels_.rows(spec_, call_, grads_, i / chunks / spec_.Hq, i / chunks % spec_.Hq, begin, end);
    });
    for (int64_t h = 0; h < spec_.Hq && grads_.dsink; ++h) {
      double sum = 0;
      for (int64_t i = 0; i < chunks * heads; ++i) sum += i / chunks % spec_.Hq == h ? sums[i] : 0;
      store(grads_.dsink, h, sum);
    }
  }

  void clear_dq(int64_t first, int64_t count) {
    const int64_t row = spec_.D * item_bytes(compute_type());
    memset(static_cast<char*>(grads_.dq_sum) + first * row, 0, count * row);
  }

  void store(void* target, int64_t at, double x) const {
    if (spec_.dtype == kFloat64)
      static_cast<double*>(target)[at] = x;
    else
      static_cast<float*>(target)[at] = static_cast<float>(x);
  }

  // Orders the chunks. The first chunks of all heads come first: with a causal mask they have the
  // most queries and take longest. In this order, chunks of one head rarely run at the same time.
  ChunkId chunk_id(int64_t index) const {
    const int64_t head = index % kv_heads_, in_head = index / kv_heads_, kv_head = head % spec_.Hkv;
    const int64_t classes = layouts_[kv_head].classes;
    return {head / spec_.Hkv, kv_head, in_head % classes, in_head / classes};
  }

  // A tile of queries: rows row, row + step, ..., all of one residue class.
  struct Tile {
    int64_t batch, head, row, step, rows;
  };

  Tile tile_of(const ChunkId& id, const Layout& at, int64_t tile, int64_t head) const {
    const int64_t first = modulo(id.key_class - offset(id.batch), at.step) + tile * tile_rows() * at.step;
    const int64_t rows = first < spec_.Lq ? ceil_div(spec_.Lq - first, at.step) : 0;
    return {id.batch, head, first, at.step, std::min(rows, tile_rows())};
  }

  template <class Visit>
  void for_each_panel(const Tile& t, Visit visit) const {
    for (int64_t at = 0; at < t.rows; at += panel_) {
      const int rows = static_cast<int>(std::min<int64_t>(panel_, t.rows - at));
      visit(Rows{t.batch, t.head, t.row + at * t.step, t.step, rows});
    }
  }

  // Reach: bit c of a tile's words tells whether a row of the tile may attend to a key of chunk c

  uint64_t* reach(const ChunkId& id, int64_t tile) {
    const Layout& at = layouts_[id.kv_head];
    const int64_t batch = finder_.varies_by_batch() ? id.batch : 0;
    return reach_.data() + at.reach_at + ((batch * at.classes + id.key_class) * at.tiles + tile) * words(at);
  }

  void find_reach() {
    const int64_t samples = finder_.varies_by_batch() ? spec_.B : 1;
    const int64_t heads = finder_.varies_by_head() ? spec_.Hkv : 1;
    int64_t tiles = 0;
    for (int64_t h = 0; h < heads; ++h) tiles = std::max(tiles, layouts_[h].classes * layouts_[h].tiles);
    parallel_for(samples * heads * tiles, [&](int64_t i, int) {
      const int64_t tile = i % tiles, kv_head = i / tiles % heads;
      const Layout& at = layouts_[kv_head];
      if (tile < at.classes * at.tiles)
        find_tile_reach({i / tiles / heads, kv_head, tile / at.tiles, 0}, at, tile % at.tiles);
    });
  }

  void find_tile_reach(const ChunkId& id, const Layout& at, int64_t tile) {
    if (Stopper::poll(&stopper_)) return;
    uint64_t* words = reach(id, tile);
    Spans spans;
    for (int64_t g = 0; g < (finder_.varies_by_head() ? group() : 1); ++g)
      for_each_panel(tile_of(id, at, tile, id.kv_head * group() + g), [&](const Rows& rows) {
        finder_.find(rows, spans);
        for (const Span& span : spans)
          for (int64_t c = span.begin / at.chunk; c <= (span.end - 1) / at.chunk; ++c)
            words[c / 64] |= uint64_t{1} << c % 64;
      });
  }

  bool reaches(const ChunkId& id, int64_t tile, int64_t chunk) {
    return !masked_ || (reach(id, tile)[chunk / 64] >> chunk % 64 & 1);
  }

  // Returns the last chunk before this one that the tile attends to, or -1.
  int64_t previous_chunk(const ChunkId& id, int64_t tile) {
    int64_t c = id.chunk - 1;
    while (c >= 0 && !reaches(id, tile, c)) --c;
    return c;
  }

  // Chunks

  Chunk make_chunk(const ChunkId& id, const Layout& at, int worker) const {
    Chunk c{};
    c.spec = &spec_, c.call = &call_, c.grads = &grads_;
    c.batch = id.batch, c.kv_head = id.kv_head;
    c.row_step = c.key_step = at.step;
    c.key = id.key_class;
    c.begin = std::min(id.chunk * at.chunk, keys(id.key_class, at));
    c.end = std::min(c.begin + at.chunk, keys(id.key_class, at));
    c.copy_k = should_copy(call_.k, spec_.k, spec_.D), c.copy_v = should_copy(call_.v, spec_.v, spec_.Dv);
    c.scratch = scratches_[worker];
    return c;
  }

  int64_t keys(int64_t key_class, const Layout& at) const { return ceil_div(spec_.Lk - key_class, at.step); }

  // Runs all chunks. Each chunk has its own share of the sums of dby_head; if these shares would
  // take too much memory, the chunks run in several rounds, and each round's shares are added at
  // its end.
  void run_chunks() {
    for (int64_t first = 0; first < chunk_ids_ && !stopper_.stopped(); first += ids_at_once_) {
      parallel_for(std::min(ids_at_once_, chunk_ids_ - first) * kv_heads_,
                   [&](int64_t i, int worker) { run_chunk(chunk_id(first * kv_heads_ + i), i, worker); });
      if (grads_.dby_head) add_shares();
    }
  }

  // Runs one chunk. Tiles whose dq no earlier chunk adds to come first, then tiles where this chunk
  // may have to wait for an earlier chunk. Both groups go from the last tile to the first: with a
  // causal mask all chunks add to the last tile, so that tile has the most turns.
  void run_chunk(const ChunkId& id, int64_t share, int worker) {
    const Layout& at = layouts_[id.kv_head];
    if (id.chunk >= at.chunks) return;
    Chunk chunk = make_chunk(id, at, worker);
    if (grads_.dby_head) chunk.by_head = shares_.data() + share * group() * columns_;
    kernels_.open(chunk);
    for (const bool waits : {false, true})
      for (int64_t tile = at.tiles - 1; tile >= 0; --tile) {
        if (!reaches(id, tile, id.chunk)) continue;
        const int64_t previous = grads_.dq ? previous_chunk(id, tile) : -1;
        if ((previous >= 0) == waits && !run_tile(id, at, chunk, tile, previous)) return;
      }
    kernels_.close(chunk);
  }

  // Returns false if the call has been stopped.
  bool run_tile(const ChunkId& id, const Layout& at, const Chunk& chunk, int64_t tile, int64_t previous) {
    if (Stopper::poll(&stopper_)) return false;
    Spans spans[kTilePanels];
    Panel panels[kTilePanels];
    std::atomic<int64_t>* turn =
        grads_.dq ? &turns_[at.turns_at + (id.batch * at.classes + id.key_class) * at.tiles + tile] : nullptr;
    for (int64_t g = 0; g < group(); ++g) {
      const int count = find_panels(tile_of(id, at, tile, id.kv_head * group() + g), chunk, spans, panels,
                                    g > 0 && !finder_.varies_by_head());
      kernels_.tile(chunk, panels, count);
      if (!turn) continue;
      if (g == 0 && !wait(*turn, previous)) return false;
      kernels_.add_queries(chunk, panels, count);
    }
    if (turn) turn->store(id.chunk + 1, std::memory_order_release);
    return true;
  }

  // Fills `panels` with the tile's panels and returns their number. Finds the panels' spans, unless
  // reuse_spans says that `spans` already holds them.
  int find_panels(const Tile& t, const Chunk& chunk, Spans* spans, Panel* panels, bool reuse_spans) const {
    int count = 0;
    for_each_panel(t, [&](const Rows& rows) {
      if (!reuse_spans) finder_.find(rows, chunk.begin, chunk.end, spans[count]);
      panels[count] = {rows.head, rows.row, rows.count, spans[count].data(),
                       static_cast<int64_t>(spans[count].size())};
      ++count;
    });
    return count;
  }

  // Waits until `chunk` has added to the tile's dq. Chunks start in ascending order, so `chunk` has started.
  // Returns false if the call has been stopped.
  bool wait(const std::atomic<int64_t>& turn, int64_t chunk) {
    for (int spins = 0; turn.load(std::memory_order_acquire) <= chunk; ++spins) {
      if (spins < 1000) continue;
      if (Stopper::poll(&stopper_)) return false;
      sched_yield();
    }
    return true;
  }

  // Sums whose order is fixed, so that results do not depend on threads

  void add_shares() {
    const int64_t row = spec_.Hq * columns_;
    for (size_t i = 0; i < shares_.size(); ++i) by_head_[i % row] += shares_[i];
    std::fill(shares_.begin(), shares_.end(), 0.0);
  }

  // Computes a broadcast bias's gradient. Each task owns some elements and visits all pairs that add to
  // them.
  void sum_bias() {
    const Strides& s = grads_.dbias_stride;
    Layout at{};
    at.step = 1;
    divide(at);
    const int64_t samples = s.b ? spec_.B : 1, heads = s.h ? spec_.Hq : 1;
    const int64_t tiles = s.l ? at.tiles : 1, chunks = s.d ? at.chunks : 1;
    parallel_for(samples * heads * tiles * chunks, [&](int64_t i, int worker) {
      const int64_t chunk = i % chunks, tile = i / chunks % tiles, head = i / chunks / tiles % heads,
                    batch = i / chunks / tiles / heads;
      Gradients local = grads_;
      std::vector<float> sums;
      if (has_16_bit_pairs()) sum_in_float(local, sums, at, tile, chunk);
      for (int64_t b = s.b ? batch : 0; b < (s.b ? batch + 1 : spec_.B); ++b)
        for (int64_t h = s.h ? head : 0; h < (s.h ? head + 1 : spec_.Hq); ++h)
          for (int64_t c = s.d ? chunk : 0; c < (s.d ? chunk + 1 : at.chunks); ++c)
            add_bias({b, h / group(), 0, c}, at, local, h, s.l ? tile : 0, s.l ? tile + 1 : at.tiles, worker);
      if (has_16_bit_pairs()) round_bias(sums, at, batch * s.b + head * s.h, tile, chunk);
    });
  }

  // A 16-bit dbias with a row dim and a key dim is summed in float, one tile at a time, and rounded
  // once.
  bool has_16_bit_pairs() const { return bias_has_pairs(spec_, grads_) && item_bytes(spec_.bias_dtype) == 2; }

  // Redirects dbias to `sums`, which has one element for each query of the tile and key of the
  // chunk.
  void sum_in_float(Gradients& local, std::vector<float>& sums, const Layout& at, int64_t tile,
                    int64_t chunk) const {
    sums.assign(tile_rows() * at.chunk, 0);
    local.dbias_stride = {0, 0, at.chunk, 1};
    local.dbias = sums.data() - (tile * tile_rows() + chunk) * at.chunk;
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

  void add_bias(const ChunkId& id, const Layout& at, const Gradients& grads, int64_t head, int64_t tile,
                int64_t end, int worker) {
    Chunk chunk = make_chunk(id, at, worker);
    chunk.grads = &grads;
    chunk.bias_only = true;
    kernels_.open(chunk);
    Spans spans[kTilePanels];
    Panel panels[kTilePanels];
    for (; tile < end && !Stopper::poll(&stopper_); ++tile) {
      const int count = find_panels(tile_of(id, at, tile, head), chunk, spans, panels, false);
      if (std::any_of(panels, panels + count, [](const Panel& p) { return p.n_spans > 0; }))
        kernels_.tile(chunk, panels, count);
    }
  }

  // Exact rows: forward marked them with a negative sum, because their scores overflow the compute type. They
  // run one at a time, in double precision. Their dk and dv are summed first, because chunks start from these
  // sums; all other gradients are added at the end.
  void sum_exact_keys() {
    if (!any_exact()) return;
    dk_exact_.resize(grads_.dk ? kv_heads_ * spec_.Lk * spec_.D : 0);
    dv_exact_.resize(grads_.dv ? kv_heads_ * spec_.Lk * spec_.Dv : 0);
    grads_.dk_exact = grads_.dk ? dk_exact_.data() : nullptr;
    grads_.dv_exact = grads_.dv ? dv_exact_.data() : nullptr;
    Gradients only_keys = grads_;
    only_keys.dq = only_keys.dbias = only_keys.dby_head = only_keys.dsink = nullptr;
    add_exact_rows(only_keys);
  }

  void add_exact_rows() {
    Gradients all_but_keys = grads_;
    all_but_keys.dk = all_but_keys.dv = nullptr;
    if (any_exact()) add_exact_rows(all_but_keys);
  }

  bool any_exact() const {
    const int64_t rows = spec_.B * spec_.Hq * spec_.Lq;
    bool exact = false;
    for (int64_t i = 0; i < rows && !exact; ++i) exact = is_exact(rows + i);
    return exact;
  }

  void add_exact_rows(const Gradients& grads) {
    const int64_t rows = spec_.B * spec_.Hq * spec_.Lq;
    Spans spans;
    for (int64_t i = 0; i < rows && !Stopper::poll(&stopper_); ++i)
      if (is_exact(rows + i))
        add_exact_row(i / spec_.Lq / spec_.Hq, i / spec_.Lq % spec_.Hq, i % spec_.Lq, grads, spans);
  }

  // The sums are the second half of the stats.
  bool is_exact(int64_t at) const {
    return spec_.dtype == kFloat64 ? static_cast<const double*>(grads_.stats)[at] < 0
                                   : static_cast<const float*>(grads_.stats)[at] < 0;
  }

  void add_exact_row(int64_t batch, int64_t head, int64_t row, const Gradients& grads, Spans& spans) {
    finder_.find({batch, head, row, 1, 1}, spans);
    const Panel panel{head, row, 1, spans.data(), static_cast<int64_t>(spans.size())};
    kernels_.exact_row(task(batch, head, row, 1, {}, scratches_[0]), panel, grads);
  }

  Gradients grads_;
  const bool masked_;
  const BackwardKernels& kernels_;
  int panel_, workers_ = 1;
  int64_t kv_heads_, columns_, chunk_ids_ = 0, ids_at_once_ = 0;
  std::vector<Layout> layouts_;
  std::vector<uint64_t> reach_;
  std::vector<std::atomic<int64_t>> turns_;  // of each tile, 1 + the last chunk that has added to its dq
  std::vector<double> shares_;               // shares of dby_head: [chunk][sample][head][column]
  std::vector<double> by_head_;              // dby_head: [head][column]
  std::vector<double> dk_exact_, dv_exact_;  // dk and dv of exact rows
  std::unique_ptr<char[]> buffer_;           // delta, and dq_sum if dq has 16 bits
  std::vector<void*> scratches_;
};

}  // namespace

Outcome backward(const Spec& spec, const Call& call, const Gradients& grads, const Ints& code,
                 Interrupt interrupt) {
  if (is_empty(spec)) return Outcome::kDone;
  return Backward(spec, call, grads, code, interrupt).run();
}

}  // namespace regard
