// Backward attention for one chunk of keys of one key head: computes dk and dv of the chunk and
// adds to dq. Loop order: tiles of up to kTilePanels panels of queries, blocks of 96 keys, panels.
// Weights and ds are [key][P] with rows in the lanes; dk and dv are summed in register tiles of 6
// keys x P channels. With the unnormalised weight w = 2^(s - shift), and dout divided by the row's
// softmax sum:
//   dv = w dout,  dp = dout v,  ds = w (dp - delta),  dk = ds q,  dq = ds k.
#include "kernels/arena.inl.h"
#include "kernels/exact_gradients.inl.h"
#include "kernels/few.inl.h"
#include "kernels/scores.inl.h"

namespace {

// ds of one vector of (query, key) pairs. A dropped weight is stored negated.
template <class V, bool Dropped>
inline V score_gradient(V weight, V dp, V delta) {
  if (Dropped) dp = keep(not_less(weight, Lanes<V>::zero()), dp);
  return (Dropped ? abs(weight) : weight) * (dp - delta);
}

// Returns whether all elements are finite (x - x == 0). Four alternating sums shorten the
// dependency chain.
template <class V>
inline bool all_finite(const Number<V>* x, int64_t n) {
  V zero[4] = {Lanes<V>::zero(), Lanes<V>::zero(), Lanes<V>::zero(), Lanes<V>::zero()};
  int64_t i = 0;
  for (; i + 4 * V::N <= n; i += 4 * V::N)
    UNROLLED (j, 4) {
      const V y = Lanes<V>::load(x + i + j * V::N);
      zero[j] = zero[j] + (y - y);
    }
  for (; i < n; ++i) zero[0] = zero[0] + Lanes<V>::set(x[i] - x[i]);
  const V sum = (zero[0] + zero[1]) + (zero[2] + zero[3]);
  return bits(differs(sum, sum)) == 0;
}

template <class V, class S>
struct Backward {
  using Scalar = Number<V>;
  static constexpr int P = kPanel<V>;
  static constexpr uint32_t kAllLanes = P == 32 ? ~0u : (1u << P) - 1;
  static constexpr int64_t kKeys = kBackwardBlock;
  static constexpr int64_t kKeyTiles = kKeys / kLanesRows;  // register tiles in a block
  static constexpr int64_t kBlockSize = kKeys * P;

  // A panel's scaled queries[D][P], dout[Dv][P], dq[D][P] (with few rows: [row][D or Dv]), each lane's
  // shift, delta and dropout words, and the next span.
  struct State {
    Scalar *queries, *dout, *dq, *shift, *delta;
    uint32_t *low, *high;
    int64_t span = 0;
    int rows = 0;
    uint32_t all = kAllLanes;  // the lanes of a full span
  };

  const Chunk& chunk;
  const Spec& spec;
  const Call& call;
  const Gradients& grads;
  const bool few;                               // few query rows: lanes are channels in most products
  int64_t q_slices, v_slices;                   // slices of P columns
  Scalar *q_rows, *dout_rows;                   // [slice][kTilePanels * P][P]
  Scalar *weights, *ds;                         // [panel][kKeys][P]
  Scalar *cap_slopes, *factor, *unused_totals;  // softcap derivatives [kKeys][P]; [P]; [P]
  Scalar *dk_sum, *dv_sum;                      // [key][slice * P]
  Scalar *keys, *values;                        // converted rows of K and V, if copied
  Scalar* table;                                // ds of one panel and block, summed by distance
  State states[kTilePanels];
  bool want_ds, want_k, want_v;
  enum { kUnknown, kYes, kNo } finite_rows = kUnknown;
  int64_t ldk, ldv;
  const Scalar *k, *v;

  explicit Backward(const Chunk& c)
      : chunk(c), spec(*c.spec), call(*c.call), grads(*c.grads), few(c.spec->Lq <= kFewRows) {
    q_slices = (spec.D + P - 1) / P;
    v_slices = (spec.Dv + P - 1) / P;
    want_k = grads.dk && !chunk.bias_only;
    want_v = grads.dv && !chunk.bias_only;
    want_ds = grads.dq || grads.dk || grads.dbias || grads.dby_head;
    lay_out(Arena{static_cast<char*>(c.scratch)});
  }

  void locate_rows() {
    k = first_row(call.k, spec.k, chunk.copy_k, spec.D, keys, ldk);
    v = first_row(call.v, spec.v, chunk.copy_v, spec.Dv, values, ldv);
  }

  // Buffers that persist between `open`, `tile` and `close` of one chunk come first, so that their
  // addresses do not depend on the sizes of the other buffers.
  Arena lay_out(Arena a) {
    const int64_t n = round_up(chunk.end - chunk.begin, kKeys), tile = kTilePanels * P;
    dk_sum = a.take<Scalar>(want_k ? n * q_slices * P : 0);
    dv_sum = a.take<Scalar>(want_v ? n * v_slices * P : 0);
    keys = a.take<Scalar>(chunk.copy_k ? n * spec.D : 0);
    values = a.take<Scalar>(chunk.copy_v ? n * spec.Dv : 0);
    for (State& s : states)
      s = {a.take<Scalar>(spec.D * P), a.take<Scalar>(spec.Dv * P), a.take<Scalar>(spec.D * P),
           a.take<Scalar>(P),          a.take<Scalar>(P),           a.take<uint32_t>(P),
           a.take<uint32_t>(P)};
    q_rows = a.take<Scalar>(q_slices * tile * P);
    dout_rows = a.take<Scalar>(v_slices * tile * P);
    weights = a.take<Scalar>(kTilePanels * kBlockSize);
    ds = a.take<Scalar>(kTilePanels * kBlockSize);
    cap_slopes = a.take<Scalar>(spec.softcap > 0 ? kBlockSize : 0);
    factor = a.take<Scalar>(P);
    unused_totals = a.take<Scalar>(P);
    table = a.take<Scalar>(spec.bias == kRelative ? kKeys + P : 0);
    return a;
  }

  static int64_t scratch_bytes(const Spec& spec, const Gradients& grads, int64_t n, bool copy_k,
                               bool copy_v) {
    Chunk c{};
    c.spec = &spec;
    c.grads = &grads;
    c.end = n;
    c.copy_k = copy_k;
    c.copy_v = copy_v;
    const Call call{};
    c.call = &call;
    char* const dummy_base = reinterpret_cast<char*>(64);
    return Backward(c).lay_out(Arena{dummy_base}).free - dummy_base;
  }

  int64_t offset() const { return call.offsets ? call.offsets[chunk.batch] : call.offset; }

  const S* key_row(const void* base, const Strides& s, int64_t key) const {
    return static_cast<const S*>(base) + chunk.batch * s.b + chunk.kv_head * s.h +
           (chunk.key + key * chunk.key_step) * s.l;
  }

  // Returns row chunk.begin of K or V and sets `ld` to the distance between rows.
  const Scalar* first_row(const void* base, const Strides& s, bool copy, int64_t width, const Scalar* copied,
                          int64_t& ld) const {
    ld = copy ? width : s.l * chunk.key_step;
    return copy ? copied : reinterpret_cast<const Scalar*>(key_row(base, s, chunk.begin));
  }

  void open() {
    const int64_t n = chunk.end - chunk.begin;
    if (want_k) start(dk_sum, n, q_slices, spec.D, grads.dk_exact, 1 / spec.scale);
    if (want_v) start(dv_sum, n, v_slices, spec.Dv, grads.dv_exact, 1);
    if (chunk.copy_k)
      copy_rows<V>(key_row(call.k, spec.k, chunk.begin), spec.k.l * chunk.key_step, spec.k.d, n, spec.D,
                   spec.D, keys);
    if (chunk.copy_v)
      copy_rows<V>(key_row(call.v, spec.v, chunk.begin), spec.v.l * chunk.key_step, spec.v.d, n, spec.Dv,
                   spec.Dv, values);
  }

  // Initialises a sum with the gradients of exact rows, or zeros.
  void start(Scalar* sum, int64_t n, int64_t slices, int64_t width, const double* exact,
             double factor) const {
    for (int64_t i = 0; i < n * slices * P; ++i) sum[i] = 0;
    const double* head = exact ? exact + (chunk.batch * spec.Hkv + chunk.kv_head) * spec.Lk * width : nullptr;
    for (int64_t j = 0; head && j < n; ++j)
      for (int64_t d = 0; d < width; ++d)
        sum[j * slices * P + d] =
            static_cast<Scalar>(head[(chunk.key + (chunk.begin + j) * chunk.key_step) * width + d] * factor);
  }

  // Queries

  // Returns whether the queries and dout of the tile are finite. Computed at most once for a tile.
  bool rows_are_finite(int count) {
    if (finite_rows != kUnknown) return finite_rows == kYes;
    const int64_t tile = kTilePanels * P * P;
    bool finite = true;
    for (int i = 0; i < count; ++i) {
      const int64_t first = i * P * P, n = states[i].rows * P;
      for (int64_t c = 0; c < q_slices; ++c) finite &= all_finite<V>(q_rows + c * tile + first, n);
      for (int64_t c = 0; c < v_slices; ++c) finite &= all_finite<V>(dout_rows + c * tile + first, n);
    }
    finite_rows = finite ? kYes : kNo;
    return finite;
  }

  void load_panel(const Panel& p, State& s, int i) {
    const double scale = spec.softcap > 0 ? 2 * kLog2E * spec.scale / spec.softcap : kLog2E * spec.scale;
    const S* q =
        static_cast<const S*>(call.q) + chunk.batch * spec.q.b + p.head * spec.q.h + p.row * spec.q.l;
    const Strides& g = grads.dout_stride;
    const S* dout = static_cast<const S*>(grads.dout) + chunk.batch * g.b + p.head * g.h + p.row * g.l;
    const int64_t q_step = spec.q.l * chunk.row_step, g_step = g.l * chunk.row_step, tile = kTilePanels * P;
    const uint32_t skipped = load_lanes(p, s);
    if (p.rows < P && !few) clear_panel(s, i);
    if (few) {
      load_few(
          q, q_step, spec.q.d, p.rows, spec.D, [&](int) { return static_cast<Scalar>(scale); }, s.queries);
      load_few(dout, g_step, g.d, p.rows, spec.Dv, [&](int t) { return factor[t]; }, s.dout);
    } else {
      pack<V>(q, q_step, spec.q.d, p.rows, spec.D, Scaled<V>{static_cast<Scalar>(scale)}, s.queries);
      pack<V>(dout, g_step, g.d, p.rows, spec.Dv, Scaled<V>{1}, s.dout);
      for (int64_t d = 0; d < spec.Dv; ++d)
        for (int r = 0; r < P; r += V::N)
          Lanes<V>::store(s.dout + d * P + r,
                          Lanes<V>::load(s.dout + d * P + r) * Lanes<V>::load(factor + r));
    }
    pack_slices<V>(dout, g_step, g.d, p.rows, spec.Dv, factor, tile, dout_rows + i * P * P);
    for (int t = 0; t < P; ++t) factor[t] = 1;
    pack_slices<V>(q, q_step, spec.q.d, p.rows, spec.D, factor, tile, q_rows + i * P * P);
    for (int t = 0; t < P && skipped; ++t)
      if (skipped >> t & 1) clear_row(s, i, t);
    for (int64_t d = 0; d < spec.D * (few ? p.rows : P); ++d) s.dq[d] = 0;
    s.span = 0;
    s.rows = p.rows;
    // A bias may give an unused lane an infinite weight. So spans of the used lanes are then partial.
    s.all = spec.bias == kNoBias && p.rows < P ? (1u << p.rows) - 1 : kAllLanes;
  }

  // target[row][width] = source[row][width] * factor(row)
  template <class Factor>
  static void load_few(const S* source, int64_t row_stride, int64_t stride, int rows, int64_t width,
                       Factor factor_of, Scalar* target) {
    copy_rows<V>(source, row_stride, stride, rows, width, width, target);
    for (int t = 0; t < rows; ++t)
      for (int64_t d = 0; d < width; ++d) target[t * width + d] *= factor_of(t);
  }

  // Loads each lane's shift, delta and the factor of its dout. Lanes beyond the rows get zeros.
  // Returns the set of skipped rows: fully masked rows and the exact rows that forward marked. They
  // get a large shift, which makes their weights 0.
  uint32_t load_lanes(const Panel& p, State& s) {
    const int64_t rows = spec.B * spec.Hq * spec.Lq, head = chunk.batch * spec.Hq + p.head;
    const Scalar* shift = static_cast<const Scalar*>(grads.stats) + head * spec.Lq + p.row;
    const Scalar* delta = static_cast<const Scalar*>(grads.delta) + head * spec.Lq + p.row;
    uint32_t skipped = 0;
    for (int t = 0; t < P; ++t) {
      const int64_t row = t * chunk.row_step;
      const bool valid = t < p.rows && !(shift[rows + row] <= 0);
      factor[t] = valid ? static_cast<Scalar>(spec.keep_scale) / shift[rows + row] : 0;
      s.delta[t] = valid ? delta[row] / shift[rows + row] : 0;
      // A shift of -inf in a row that attends to keys means that a score is NaN.
      const bool finite = valid && shift[row] > -static_cast<Scalar>(__builtin_inf());
      s.shift[t] = finite ? shift[row] : valid || t >= p.rows ? 0 : Exp2<V>::kLargestShift;
      skipped |= t < p.rows && !valid ? 1u << t : 0;
    }
    if (spec.drop_below)
      dropout_streams<V>(spec, call, chunk.batch, p.head, p.row, chunk.row_step, s.low, s.high);
    return skipped;
  }

  void clear_row(State& s, int i, int t) {
    for (int64_t d = 0; d < spec.D; ++d) s.queries[index(t, d, spec.D)] = 0;
    for (int64_t d = 0; d < spec.Dv; ++d) s.dout[index(t, d, spec.Dv)] = 0;
    for (int64_t d = 0; d < q_slices * P; ++d) element(q_rows, i, t, d) = 0;
    for (int64_t d = 0; d < v_slices * P; ++d) element(dout_rows, i, t, d) = 0;
  }

  // Returns the index of channel d of row t in a buffer of State.
  int64_t index(int t, int64_t d, int64_t width) const { return few ? t * width + d : d * P + t; }

  // Returns element d of row t of panel i.
  static Scalar& element(Scalar* rows, int i, int t, int64_t d) {
    return rows[((d / P * kTilePanels + i) * P + t) * P + d % P];
  }

  void clear_panel(State& s, int i) {
    for (int64_t d = 0; d < spec.D * P; ++d) s.queries[d] = 0;
    for (int64_t d = 0; d < spec.Dv * P; ++d) s.dout[d] = 0;
    for (int64_t c = 0; c < q_slices; ++c)
      for (int64_t d = 0; d < P * P; ++d) q_rows[(c * kTilePanels + i) * P * P + d] = 0;
    for (int64_t c = 0; c < v_slices; ++c)
      for (int64_t d = 0; d < P * P; ++d) dout_rows[(c * kTilePanels + i) * P * P + d] = 0;
  }

  // Computes weights w and score gradients g of keys [from, to), which some row of the panel may
  // attend to. The block begins at key `begin`.
  void compute_weights_and_ds(const Panel& p, const State& s, const Span* spans, int64_t begin, int64_t from,
                              int64_t to, bool partial, Scalar* w, Scalar* g) {
    const int64_t n = to - from, first_key = from - chunk.begin;
    w += (from - begin) * P;
    g += (from - begin) * P;
    const TileCoords at{
        chunk.batch,    p.head, p.row, chunk.row_step, offset() + p.row, chunk.key + from * chunk.key_step,
        chunk.key_step, p.rows};
    const Scalar *keys_at = k + first_key * ldk, *values_at = v + first_key * ldv;
    if (few && !partial && !spec.drop_below && !(spec.softcap > 0) && spec.bias == kNoBias)
      return compute_few(s, keys_at, values_at, n, w, g);
    if (partial || spec.softcap > 0 || spec.bias != kNoBias || !compute_weights_fused(s, keys_at, n, w))
      compute_weights(s, at, spans, partial, keys_at, from, to, w);
    if (spec.drop_below)
      drop<V, Negated>(s.low, s.high, call.origin.key + at.key, at.key_step, spec.drop_below, n, w);
    if (want_ds) {
      spec.drop_below ? compute_ds<true>(s, values_at, n, p.rows, w, g)
                      : compute_ds<false>(s, values_at, n, p.rows, w, g);
      if (partial) mask_keys<V>(spans, from, to, s.all, 0, g);
      if (bias_may_mask()) zero_masked(w, n, g);
      add_bias_gradients(at, n, g);
      if (spec.softcap > 0)
        for (int64_t i = 0; i < n * P; i += V::N) {
          const V x = Lanes<V>::load(g + i);
          Lanes<V>::store(g + i, keep(differs(x, Lanes<V>::zero()), x * Lanes<V>::load(cap_slopes + i)));
        }
    }
    if (spec.drop_below)
      for (int64_t i = 0; i < n * P; i += V::N)
        Lanes<V>::store(w + i, max(Lanes<V>::zero(), Lanes<V>::load(w + i)));
  }

  // Processes adjacent spans. Long full spans are processed separately, without applying a mask.
  void process_spans(const Panel& p, const State& s, const Span* span, int64_t begin, int64_t from,
                     int64_t to, Scalar* w, Scalar* g) {
    const auto is_long = [&](const Span* r) { return r->lanes == s.all && r->end - r->begin >= P; };
    while (from < to) {
      const Span* first = span;
      int64_t stop;
      bool partial = false;
      do {
        partial |= span->lanes != s.all;
        stop = span->end < to ? span->end : to;
        ++span;
      } while (stop < to && !is_long(first) && !is_long(span));
      compute_weights_and_ds(p, s, first, begin, from, stop, partial, w, g);
      from = stop;
    }
  }

  // Computes scores and weights in one pass. Returns false with few rows, or if D or a shift is too large.
  bool compute_weights_fused(const State& s, const Scalar* rows, int64_t n, Scalar* w) {
    const V shift[2] = {Lanes<V>::load(s.shift), Lanes<V>::load(s.shift + V::N)};
    if (few || spec.D > kChain || !ShiftedExp2<V>::fits(shift[0]) || !ShiftedExp2<V>::fits(shift[1]))
      return false;
    const ShiftedExp2<V> power[2] = {ShiftedExp2<V>(shift[0]), ShiftedExp2<V>(shift[1])};
    multiply_rows<V>(rows, ldk, n, s.queries, spec.D, [&](int64_t c, int i, V score) {
      Lanes<V>::store(w + (2 * c + i) * V::N, power[i](score));
    });
    return true;
  }

  // Computes weights and ds of few rows that may attend to all n keys, without options.
  void compute_few(const State& s, const Scalar* keys_at, const Scalar* values_at, int64_t n, Scalar* w,
                   Scalar* g) const {
    visit_row_blocks<V>(0, s.rows, [&](auto block, int64_t first) {
      constexpr int R = block.value;
      const V shift = repeat_rows<V, R>(s.shift + first), delta = repeat_rows<V, R>(s.delta + first);
      for (int64_t c = 0; c < n; c += V::N / R) {
        const V weight =
            exp2(dots_of_rows<V, R>(s.queries + first * spec.D, spec.D, keys_at, ldk, c, n) - shift);
        store_products<V, R>(weight, c, n, w + first);
        if (!want_ds) continue;
        const V dp = dots_of_rows<V, R>(s.dout + first * spec.Dv, spec.Dv, values_at, ldv, c, n);
        store_products<V, R>(score_gradient<V, false>(weight, dp, delta), c, n, g + first);
      }
    });
  }

  void compute_weights(const State& s, const TileCoords& at, const Span* spans, bool partial,
                       const Scalar* rows, int64_t from, int64_t to, Scalar* w) {
    const V shift[2] = {Lanes<V>::load(s.shift), Lanes<V>::load(s.shift + V::N)};
    const int64_t n = to - from;
    multiply_queries(rows, ldk, n, s.queries, at.rows, spec.D, w);
    if (spec.softcap > 0) cap(w, n);
    add_bias<V, S>(spec, call, at, n, w);
    if (partial) mask_keys<V>(spans, from, to, s.all, -static_cast<Scalar>(__builtin_inf()), w);
    exponentiate<V>(w, n, shift, unused_totals);
  }

  // products[n][P] = rows[n][width] * panel, where `panel` is `queries` or `dout` of a State.
  void multiply_queries(const Scalar* rows, int64_t ld, int64_t n, const Scalar* panel, int count,
                        int64_t width, Scalar* products) const {
    V unused_max[2] = {Lanes<V>::zero(), Lanes<V>::zero()};
    if (few)
      multiply_few<V>(panel, count, width, rows, ld, n, products);
    else
      score_keys<V>(rows, ld, n, panel, width, products, unused_max);
  }

  template <bool Dropped>
  void compute_ds(const State& s, const Scalar* rows, int64_t n, int count, const Scalar* w, Scalar* g) {
    const V delta[2] = {Lanes<V>::load(s.delta), Lanes<V>::load(s.delta + V::N)};
    const auto finish = [&](int64_t c, int i, V dp) {
      const int64_t at = (2 * c + i) * V::N;
      Lanes<V>::store(g + at, score_gradient<V, Dropped>(Lanes<V>::load(w + at), dp, delta[i]));
    };
    if (!few && spec.Dv <= kChain) return multiply_rows<V>(rows, ldv, n, s.dout, spec.Dv, finish);
    multiply_queries(rows, ldv, n, s.dout, count, spec.Dv, g);
    for (int64_t c = 0; c < n; ++c)
      for (int i = 0; i < 2; ++i) finish(c, i, Lanes<V>::load(g + (2 * c + i) * V::N));
  }

  // Returns whether keys inside spans may be masked by a bias of -inf. Only their weight of 0 shows
  // that they are masked.
  bool bias_may_mask() const { return spec.bias == kTensorBias || spec.bias == kRelative; }

  static void zero_masked(const Scalar* w, int64_t n, Scalar* g) {
    for (int64_t i = 0; i < n * P; i += V::N)
      Lanes<V>::store(g + i, keep(differs(Lanes<V>::load(w + i), Lanes<V>::zero()), Lanes<V>::load(g + i)));
  }

  // Applies the softcap and stores its derivative 1 - tanh^2.
  void cap(Scalar* scores, int64_t n) {
    const Scalar cap = static_cast<Scalar>(spec.softcap * kLog2E);
    soft_cap<V>(scores, n * kPanel<V>, cap);
    const V inverse_cap = Lanes<V>::set(1 / cap), one = Lanes<V>::set(1);
    for (int64_t i = 0; i < n * P; i += V::N) {
      const V t = Lanes<V>::load(scores + i) * inverse_cap;
      Lanes<V>::store(cap_slopes + i, one - t * t);
    }
  }

  // Bias gradients

  void add_bias_gradients(const TileCoords& at, int64_t n, const Scalar* g) {
    if (grads.dbias && (chunk.bias_only || !bias_is_shared(spec, grads))) add_tensor_bias_gradient(at, n, g);
    if (chunk.by_head && spec.bias == kAlibi) add_slope_gradient(at, n, g);
    if (chunk.by_head && spec.bias == kRelative) add_table_gradient(at, n, g);
  }

  void add_tensor_bias_gradient(const TileCoords& at, int64_t n, const Scalar* g) {
    const Strides& s = grads.dbias_stride;
    const int64_t first = at.batch * s.b + at.head * s.h + at.row * s.l + at.key * s.d;
    if (!bias_is_shared(spec, grads)) return write_bias_gradient(at, n, g, first);
    if (bias_has_pairs(spec, grads))
      return unpack_add<V>(g, n, 1, at.rows, static_cast<Scalar*>(grads.dbias) + first, s.l * at.row_step,
                           s.d * at.key_step);
    double* target = static_cast<double*>(grads.dbias) + first;
    for (int t = 0; t < at.rows; ++t)
      for (int64_t c = 0; c < n; ++c)
        target[t * s.l * at.row_step + c * s.d * at.key_step] += static_cast<double>(g[c * P + t]);
  }

  // Writes ds to dbias without adding: the bias is not broadcast, so each element gets one value.
  void write_bias_gradient(const TileCoords& at, int64_t n, const Scalar* g, int64_t first) {
    const int64_t rows = grads.dbias_stride.l * at.row_step, cols = grads.dbias_stride.d * at.key_step;
    for (int t = 0; t < P; ++t) factor[t] = 1;
    if (spec.bias_dtype == spec.dtype)
      return unpack<V>(g, n, factor, at.rows, static_cast<S*>(grads.dbias) + first, rows, cols,
                       StoreAsIs<V>());
    unpack<V>(g, n, factor, at.rows, static_cast<Scalar*>(grads.dbias) + first, rows, cols, StoreAsIs<V>());
  }

  double* by_head_sum(const TileCoords& at, int64_t columns) const {
    return chunk.by_head + (at.head - chunk.kv_head * (spec.Hq / spec.Hkv)) * columns;
  }

  // Gradient of -slope * |position - key|.
  void add_slope_gradient(const TileCoords& at, int64_t n, const Scalar* g) {
    const V step = Lanes<V>::set(static_cast<Scalar>(at.row_step));
    V sum = Lanes<V>::zero();
    for (int64_t c = 0; c < n; ++c)
      for (int r = 0; r < P; r += V::N) {
        const int64_t base = at.position + r * at.row_step - (at.key + c * at.key_step);
        const V distance = abs(fma(Lanes<V>::iota(), step, Lanes<V>::set(static_cast<Scalar>(base))));
        sum = fma(distance, Lanes<V>::load(g + c * P + r), sum);
      }
    *by_head_sum(at, 1) -= static_cast<double>(lane_sum(sum));
  }

  // Sums ds along the diagonals of the tile, then adds the sums to the table's columns.
  void add_table_gradient(const TileCoords& at, int64_t n, const Scalar* g) {
    double* target = by_head_sum(at, call.distances);
    if (at.row_step != 1) {
      for (int64_t c = 0; c < n; ++c)
        for (int t = 0; t < at.rows; ++t) target[column(at, c, t)] += static_cast<double>(g[c * P + t]);
      return;
    }
    for (int64_t i = 0; i < n + P; ++i) table[i] = 0;
    for (int64_t c = 0; c < n; ++c)
      for (int r = 0; r < P; r += V::N) {
        Scalar* d = table + n - 1 - c + r;
        Lanes<V>::store(d, Lanes<V>::load(d) + Lanes<V>::load(g + c * P + r));
      }
    for (int64_t i = 0; i < n - 1 + P; ++i)
      target[column(at, n - 1, static_cast<int>(i))] += static_cast<double>(table[i]);
  }

  int64_t column(const TileCoords& at, int64_t c, int64_t t) const {
    return clamp_index(at.position + t * at.row_step - (at.key + c * at.key_step) - call.distance_low,
                       call.distances);
  }

  // Matrix products

  void add_query_gradients(const Panel& p, State& s, const Span* spans, int64_t begin, int64_t from,
                           int64_t to, const Scalar* g) {
    const Scalar* rows = k + (from - chunk.begin) * ldk;
    const Scalar* weights_at = g + (from - begin) * P;
    if (masked_keys_are_finite(spans, s.all, from, to))
      return few ? add_keys_to_few<V>(weights_at, p.rows, rows, ldk, to - from, spec.D, s.dq)
                 : add_values<V>(rows, ldk, to - from, weights_at, spec.D, s.dq);
    visit_pairs(p, from, to, [&](int64_t key, int t) {
      const Scalar x = g[(key - begin) * P + t];
      for (int64_t d = 0; d < spec.D && !(bias_may_mask() && x == 0); ++d)
        s.dq[index(t, d, spec.D)] += x * k[(key - chunk.begin) * ldk + d];
    });
  }

  // Calls visit(key, lane) for the unmasked pairs of a panel in keys [from, to).
  template <class Visit>
  void visit_pairs(const Panel& p, int64_t from, int64_t to, Visit visit) const {
    for (const Span* r = p.spans; r < p.spans + p.n_spans; ++r)
      for (int64_t key = r->begin > from ? r->begin : from; key < r->end && key < to; ++key)
        for (int t = 0; t < p.rows; ++t)
          if (r->lanes >> t & 1) visit(key, t);
  }

  // Returns whether the keys that are masked for some lane are finite.
  bool masked_keys_are_finite(const Span* spans, uint32_t all, int64_t from, int64_t to) const {
    bool finite = true;
    for (int64_t key = from; key < to; ++spans) {
      const int64_t stop = spans->end < to ? spans->end : to;
      const bool partial = bias_may_mask() || spans->lanes != all;
      for (; partial && key < stop; ++key) finite &= all_finite<V>(k + (key - chunk.begin) * ldk, spec.D);
      key = stop;
    }
    return finite;
  }

  // Adds to dk or dv of the block that begins `first_key` keys into the chunk. active[tile] is the
  // set of panels that attend to the tile's keys.
  void add_key_gradients(int64_t first_key, int64_t n, const uint32_t* active, const Scalar* a,
                         const Scalar* rows, int64_t slices, Scalar* sum) {
    for (int64_t c = 0; c < slices; ++c)
      for (int64_t tile = 0; tile * kLanesRows < n; ++tile) {
        const int64_t first = tile * kLanesRows, left = n - first < kLanesRows ? n - first : kLanesRows;
        const Scalar* slice = rows + c * kTilePanels * P * P;
        Scalar* target = sum + (first_key + first) * slices * P + c * P;
        for (int i = 0; few && i < kTilePanels; ++i)
          if (active[tile] >> i & 1)
            add_few_lanes<V>(left, a + i * kBlockSize + first * P, states[i].rows, slice + i * P * P, target,
                             slices * P);
        if (active[tile] && !few)
          add_lanes<V>(left, a + first * P, kBlockSize, active[tile], slice, target, slices * P);
      }
  }

  // Like add_key_gradients, but skips masked pairs: 0 times a NaN in the query's row would be NaN.
  void add_key_gradients_by_pair(const Panel* panels, int count, int64_t begin, int64_t end, const Scalar* a,
                                 Scalar* rows, int64_t slices, Scalar* sum) {
    for (int i = 0; i < count; ++i)
      visit_pairs(panels[i], begin, end, [&](int64_t key, int t) {
        const Scalar x = a[i * kBlockSize + (key - begin) * P + t];
        for (int64_t d = 0; d < slices * P && !(bias_may_mask() && x == 0); ++d)
          sum[(key - chunk.begin) * slices * P + d] += x * element(rows, i, t, d);
      });
  }

  void zero_rows(int panel, int64_t from, int64_t to) {
    for (int64_t i = from * P; i < to * P; ++i)
      weights[panel * kBlockSize + i] = ds[panel * kBlockSize + i] = 0;
  }

  // Processes one panel and the block [begin, end). Returns whether all its rows attend to the
  // whole block.
  bool process_panel(const Panel& p, State& s, int panel, int64_t begin, int64_t end, uint32_t* active) {
    Scalar *w = weights + panel * kBlockSize, *g = ds + panel * kBlockSize;
    bool covers_block = false;
    visit_spans(p, s.span, begin, end, s.all, [&](const Span* first, int64_t from, int64_t to, bool partial) {
      mark_active(panel, from - begin, to - begin, end - begin, active);
      process_spans(p, s, first, begin, from, to, w, g);
      if (grads.dq && !chunk.bias_only) add_query_gradients(p, s, first, begin, from, to, g);
      covers_block = !partial && from == begin && to == end;
    });
    return covers_block;
  }

  // Adds the panel to `active` for the tiles of keys [from, to), and zeros its weights and ds for
  // the other keys of these tiles.
  void mark_active(int panel, int64_t from, int64_t to, int64_t n, uint32_t* active) {
    const int64_t first = from / kLanesRows, last = (to - 1) / kLanesRows;
    if (!(active[first] >> panel & 1)) zero_rows(panel, first * kLanesRows, from);
    const int64_t stop = (last + 1) * kLanesRows;
    zero_rows(panel, to, stop < n ? stop : n);
    for (int64_t tile = first; tile <= last; ++tile) active[tile] |= 1u << panel;
  }

  void block(const Panel* panels, int count, int64_t begin, int64_t end) {
    uint32_t active[kKeyTiles] = {};
    bool all_full = spec.bias == kNoBias || spec.bias == kAlibi;
    for (int i = 0; i < count; ++i) all_full &= process_panel(panels[i], states[i], i, begin, end, active);
    const int64_t first_key = begin - chunk.begin, n = end - begin;
    if (all_full || rows_are_finite(count)) {
      if (want_v) add_key_gradients(first_key, n, active, weights, dout_rows, v_slices, dv_sum);
      if (want_k) add_key_gradients(first_key, n, active, ds, q_rows, q_slices, dk_sum);
    } else {
      if (want_v) add_key_gradients_by_pair(panels, count, begin, end, weights, dout_rows, v_slices, dv_sum);
      if (want_k) add_key_gradients_by_pair(panels, count, begin, end, ds, q_rows, q_slices, dk_sum);
    }
  }

  void tile(const Panel* panels, int count) {
    locate_rows();
    for (int i = 0; i < count; ++i) load_panel(panels[i], states[i], i);
    for (int64_t begin = chunk.begin; begin < chunk.end; begin += kKeys)
      block(panels, count, begin, begin + kKeys < chunk.end ? begin + kKeys : chunk.end);
  }

  void add_queries(const Panel* panels, int count) {
    for (int i = 0; i < count; ++i) {
      const Panel& p = panels[i];
      Scalar* dq =
          static_cast<Scalar*>(grads.dq_sum) + ((chunk.batch * spec.Hq + p.head) * spec.Lq + p.row) * spec.D;
      for (int64_t t = 0; few && t < p.rows; ++t)
        for (int64_t d = 0; d < spec.D; ++d)
          dq[t * spec.D * chunk.row_step + d] +=
              states[i].dq[t * spec.D + d] * static_cast<Scalar>(spec.scale);
      if (!few)
        unpack_add<V>(states[i].dq, spec.D, static_cast<Scalar>(spec.scale), p.rows, dq,
                      spec.D * chunk.row_step, 1);
    }
  }

  void write(const Scalar* sum, int64_t slices, int64_t width, Scalar scale, void* base, const Strides& s) {
    S* target = static_cast<S*>(base) + chunk.batch * s.b + chunk.kv_head * s.h;
    for (int64_t j = chunk.begin; j < chunk.end; ++j, sum += slices * P) {
      S* row = target + (chunk.key + j * chunk.key_step) * s.l;
      int64_t d = 0;
      for (; s.d == 1 && d + V::N <= width; d += V::N)
        Lanes<V>::store(row + d, Lanes<V>::load(sum + d) * Lanes<V>::set(scale));
      for (; d < width; ++d) from_float(row + d * s.d, sum[d] * scale);
    }
  }

  void close() {
    if (want_k) write(dk_sum, q_slices, spec.D, static_cast<Scalar>(spec.scale), grads.dk, grads.dk_stride);
    if (want_v) write(dv_sum, v_slices, spec.Dv, 1, grads.dv, grads.dv_stride);
  }
};

template <class V, class S>
void copy_row(const Number<V>* source, S* target, int64_t n) {
  int64_t i = 0;
  for (; i + V::N <= n; i += V::N) Lanes<V>::store(target + i, Lanes<V>::load(source + i));
  for (; i < n; ++i) from_float(target + i, source[i]);
}

// delta = dout . out - dlse, and the sink's gradient
template <class V, class S>
struct BackwardRows {
  using Scalar = Number<V>;
  const Spec& spec;
  const Call& call;
  const Gradients& grads;
  int64_t batch, head;

  // Returns delta of row i of the head, which is row `index` of (B, Hq, Lq).
  Scalar delta(int64_t i, int64_t index) const {
    const Strides &o = spec.out, &g = grads.dout_stride;
    const int64_t row = batch * o.b + head * o.h + i * o.l;
    const S* y = static_cast<const S*>(grads.dout) + batch * g.b + head * g.h + i * g.l;
    Scalar sum = dot(static_cast<const S*>(grads.out) + row, y);
    if (grads.residual) sum += dot(static_cast<const S*>(grads.residual) + row, y);
    return grads.dlse ? sum - static_cast<const Scalar*>(grads.dlse)[index] : sum;
  }

  Scalar dot(const S* x, const S* y) const {
    const int64_t dx = spec.out.d, dy = grads.dout_stride.d;
    V sum = Lanes<V>::zero();
    int64_t d = 0;
    for (; d + V::N <= spec.Dv; d += V::N) sum = fma(load(x + d * dx, dx), load(y + d * dy, dy), sum);
    Scalar total = lane_sum(sum);
    for (; d < spec.Dv; ++d)
      total =
          fma_once(static_cast<Scalar>(to_float(x[d * dx])), static_cast<Scalar>(to_float(y[d * dy])), total);
    return total;
  }

  // Loads a vector with any stride, so that sums have the same order for all strides.
  static V load(const S* x, int64_t stride) {
    if (stride == 1) return Lanes<V>::load(x);
    Scalar elements[V::N];
    for (int i = 0; i < V::N; ++i) elements[i] = to_float(x[i * stride]);
    return Lanes<V>::load(elements);
  }

  // Returns the sink's softmax weight; 1 for a fully masked row.
  double sink_share(Scalar shift, Scalar total) const {
    if (total == 0) return 1;
    const Scalar sink = static_cast<Scalar>(static_cast<const Scalar*>(call.sink)[head] * kLog2E);
    Scalar power[V::N];
    Lanes<V>::store(power, exp2(Lanes<V>::set(sink) - finite_shift(Lanes<V>::set(shift))));
    return static_cast<double>(power[0]) / static_cast<double>(total);
  }

  // Computes delta of rows [begin, end). Returns their part of the sink's gradient.
  double run(int64_t begin, int64_t end) const {
    const int64_t rows = spec.B * spec.Hq * spec.Lq, first = (batch * spec.Hq + head) * spec.Lq;
    const Scalar* stats = static_cast<const Scalar*>(grads.stats);
    double dsink = 0;
    for (int64_t i = begin, row = first + begin; i < end; ++i, ++row) {
      Scalar& d = static_cast<Scalar*>(grads.delta)[row];
      const Scalar total = stats[rows + row];
      d = total == 0 ? (grads.dlse ? -static_cast<const Scalar*>(grads.dlse)[row] : 0) : delta(i, row);
      if (grads.dsink && !(total < 0)) dsink -= sink_share(stats[row], total) * static_cast<double>(d);
    }
    return dsink;
  }
};

template <class V, class S>
constexpr BackwardKernels backward_kernels() {
  using B = Backward<V, S>;
  return {B::scratch_bytes,
          [](const Spec& spec, const Call& call, const Gradients& grads, int64_t batch, int64_t head,
             int64_t begin,
             int64_t end) { return BackwardRows<V, S>{spec, call, grads, batch, head}.run(begin, end); },
          [](const Chunk& c) { B(c).open(); },
          [](const Chunk& c, const Panel* panels, int count) { B(c).tile(panels, count); },
          [](const Chunk& c, const Panel* panels, int count) { B(c).add_queries(panels, count); },
          [](const Chunk& c) { B(c).close(); },
          [](const void* source, void* target, int64_t count) {
            copy_row<V>(static_cast<const Number<V>*>(source), static_cast<S*>(target), count);
          },
          [](const Task& t, const Panel& p, const Gradients& g) { ExactGradients<V, S>(t, p, g).run(); }};
}

}  // namespace

const BackwardKernels REGARD_TABLE(backward)[4] = REGARD_EACH_DTYPE(backward_kernels);
