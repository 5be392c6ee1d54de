// Backward attention for one chunk of keys of one key head: computes dk and dv of the chunk and
// adds to dq. Loop order: tiles of up to kTilePanels panels of queries, blocks of 96 keys, panels.
// Weights and ds are [key][P] with rows in the lanes; dk and dv are summed in register tiles of 6
// keys x P channels. With the unnormalised weight w = 2^(s - shift), and dout divided by the row's
// softmax sum:
//   dv = w dout,  dp = dout v,  ds = w (dp - delta),  dk = ds q,  dq = ds k.
// With pairs, w and not dout is divided by the sum, because dout would be rounded again. w and ds are
// rounded to words of two queries for dv and dk, and ds also to words of two keys for dq.
#include "kernels/arena.inl.h"
#include "kernels/exact_gradients.inl.h"
#include "kernels/gemm.inl.h"
#include "kernels/scores.inl.h"

namespace {

// ds of one vector of (query, key) pairs. A dropped weight is stored negated.
template <class V, bool Dropped>
inline V score_gradient(V weight, V dp, V delta) {
  if (Dropped) dp = keep(not_less(weight, Lanes<V>::zero()), dp);
  return (Dropped ? abs(weight) : weight) * (dp - delta);
}

// Computes the weights w[n][P] of n keys, times `factor` with pairs. `depth` is the number of elements of
// a key. Like compute_ds, independent of the dtype, which would multiply the code.
template <class O, class V>
void compute_weights(const ScoreOptions<V, true>& options, const V (&shift)[2], const V (&factor)[2],
                     const Number<O>* keys, int64_t ld, int64_t n, const Number<O>* queries, int64_t depth,
                     Number<V>* w) {
  constexpr bool kPairs = O::kTerms == 2;
  const bool fits = ShiftedExp2<V>::fits(shift[0]) && ShiftedExp2<V>::fits(shift[1]);
  const ShiftedExp2<V> exp[2] = {ShiftedExp2<V>(shift[0]), ShiftedExp2<V>(shift[1])};
  const LargeShiftExp2<V> large[2] = {{shift[0]}, {shift[1]}};
  const V scale = Lanes<V>::set(static_cast<Number<V>>(score_factor(options.spec)));
  multiply_rows<O>(keys, ld, n, queries, depth, w, [&](int64_t c, auto& tile) {
    if (kPairs) each_vector(tile, [&](int, int, V& x) { x = x * scale; });
    options(c, tile);
    if (fits)
      each_vector(tile, [&](int, int i, V& x) { x = exp[i](x); });
    else
      each_vector(tile, [&](int, int i, V& x) { x = large[i](x); });
    if (kPairs) each_vector(tile, [&](int, int i, V& x) { x = x * factor[i]; });
    store_rows(w + c * kPanel<V>, tile);
  });
}

// Computes ds[n][P] of n keys from their weights. ds of masked pairs is 0.
template <class O, bool Dropped, class V>
void compute_ds(const ScoreOptions<V, true>& options, const V (&delta)[2], const Number<O>* values,
                int64_t ld, int64_t n, const Number<O>* dout, int64_t depth, const Number<V>* w,
                Number<V>* ds) {
  multiply_rows<O>(values, ld, n, dout, depth, ds, [&](int64_t c, auto& tile) {
    const auto weight = [&](int r, int i) { return Lanes<V>::load(w + (2 * (c + r) + i) * V::N); };
    each_vector(tile, [&](int r, int i, V& x) { x = score_gradient<V, Dropped>(weight(r, i), x, delta[i]); });
    if (options.lanes)
      each_vector(tile,
                  [&](int r, int i, V& x) { x = keep(Lanes<V>::mask(options.lanes[c + r], i * V::N), x); });
    if (options.biases)  // a bias of -inf masks a key; only the weight of 0 shows it
      each_vector(tile, [&](int r, int i, V& x) { x = keep(differs(weight(r, i), Lanes<V>::zero()), x); });
    store_rows(ds + c * kPanel<V>, tile);
  });
}

// Returns 0 in lanes where x is finite, otherwise NaN.
template <class V>
inline V zero_if_finite(V x) {
  return x - x;
}
#ifdef REGARD_PAIRS
inline Floats zero_if_finite(Pairs x) { return zero_if_finite(even(x)) + zero_if_finite(odd(x)); }
#endif

// Returns whether all numbers in n elements are finite. Four alternating sums shorten the dependency
// chain.
template <class O>
inline bool all_finite(const Number<O>* x, int64_t n) {
  using V = Sum<O>;
  V zero[4] = {Lanes<V>::zero(), Lanes<V>::zero(), Lanes<V>::zero(), Lanes<V>::zero()};
  int64_t i = 0;
  for (; i + 4 * V::N <= n; i += 4 * V::N)
    UNROLLED (j, 4) zero[j] = zero[j] + zero_if_finite(Lanes<O>::load(x + i + j * V::N));
  for (; i < n; ++i) zero[0] = zero[0] + zero_if_finite(Lanes<O>::set(x[i]));
  const V sum = (zero[0] + zero[1]) + (zero[2] + zero[3]);
  return bits(differs(sum, sum)) == 0;
}

template <class V, class S>
struct Backward {
  using Scalar = Number<V>;
  using O = Operand<V, S>;
  using Element = Number<O>;
  static constexpr int P = kPanel<V>;
  static constexpr bool kPairs = O::kTerms == 2;
  static constexpr int64_t kRowSize = P / O::kTerms;  // elements of a row of weights or ds
  static constexpr uint32_t kAllLanes = P == 32 ? ~0u : (1u << P) - 1;
  static constexpr int64_t kKeys = kBackwardBlock;
  static constexpr int64_t kRows = kTileRows<O>;
  static constexpr int64_t kKeyTiles = kKeys / kRows;  // register tiles in a block
  static constexpr int64_t kBlockSize = kKeys * P;

  // A panel's queries[D][P] (scaled, or as words), dout[Dv][P], dq[D][P], each lane's shift, delta,
  // factor of its weights (pairs) and dropout words, and the next span.
  struct State {
    Element *queries, *dout;
    Scalar *dq, *shift, *delta, *weight_factor;
    uint32_t *low, *high;
    int64_t span = 0;
  };

  const Chunk& chunk;
  const Spec& spec;
  const Call& call;
  const Gradients& grads;
  int64_t q_slices, v_slices;            // slices of P columns
  Element *q_rows, *dout_rows;           // [slice][kTilePanels * P][P]
  Scalar *weights, *ds;                  // [panel][kKeys][P]; with pairs, of one panel
  Element *weight_rows, *ds_rows;        // the same as operands [panel][kKeys][kRowSize]
  Element* ds_words;                     // pairs: ds of a panel's span, in words of two keys
  Scalar *cap_slopes, *biases, *factor;  // softcap derivatives [kKeys][P]; [kKeys][P]; [P]
  uint32_t* lanes;                       // of each key of a block
  Scalar *dk_sum, *dv_sum;               // [key][slice * P]
  Element *keys, *values;                // converted rows of K and V, if copied
  Element* key_words;                    // pairs: K in words of two keys
  Scalar* table;                         // ds of one panel and block, summed by distance
  State states[kTilePanels];
  bool want_ds, want_k, want_v;
  enum { kUnknown, kYes, kNo } finite_rows = kUnknown;
  int64_t ldk, ldv;
  const Element *k, *v;

  explicit Backward(const Chunk& c) : chunk(c), spec(*c.spec), call(*c.call), grads(*c.grads) {
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
    keys = a.take<Element>(chunk.copy_k ? n * elements(spec.D) : 0);
    values = a.take<Element>(chunk.copy_v ? n * elements(spec.Dv) : 0);
    key_words = a.take<Element>(kPairs && grads.dq ? elements(n) * spec.D : 0);
    for (State& s : states)
      s = {a.take<Element>(elements(spec.D) * P),
           a.take<Element>(elements(spec.Dv) * P),
           a.take<Scalar>(spec.D * P),
           a.take<Scalar>(P),
           a.take<Scalar>(P),
           a.take<Scalar>(P),
           a.take<uint32_t>(P),
           a.take<uint32_t>(P)};
    q_rows = a.take<Element>(q_slices * elements(tile) * P);
    dout_rows = a.take<Element>(v_slices * elements(tile) * P);
    weights = a.take<Scalar>(kPairs ? kBlockSize : kTilePanels * kBlockSize);
    ds = a.take<Scalar>(kPairs ? kBlockSize : kTilePanels * kBlockSize);
    if constexpr (kPairs) {
      weight_rows = a.take<Element>(kTilePanels * kKeys * kRowSize);
      ds_rows = a.take<Element>(kTilePanels * kKeys * kRowSize);
      ds_words = a.take<Element>(kKeys / 2 * P);
    } else {
      weight_rows = weights;
      ds_rows = ds;
      ds_words = nullptr;
    }
    cap_slopes = a.take<Scalar>(spec.softcap > 0 ? kBlockSize : 0);
    factor = a.take<Scalar>(P);
    biases = a.take<Scalar>(has_bias_block(spec) ? kBlockSize : 0);
    lanes = a.take<uint32_t>(kKeys);
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

  // Returns how many elements hold n numbers.
  static int64_t elements(int64_t n) { return (n + O::kTerms - 1) / O::kTerms; }

  int64_t offset() const { return call.offsets ? call.offsets[chunk.batch] : call.offset; }

  const S* key_row(const void* base, const Strides& s, int64_t key) const {
    return static_cast<const S*>(base) + chunk.batch * s.b + chunk.kv_head * s.h +
           (chunk.key + key * chunk.key_step) * s.l;
  }

  // Returns row chunk.begin of K or V and sets `ld` to the distance between rows.
  const Element* first_row(const void* base, const Strides& s, bool copy, int64_t width,
                           const Element* copied, int64_t& ld) const {
    ld = copy ? elements(width) : s.l * chunk.key_step / O::kTerms;
    return copy ? copied : reinterpret_cast<const Element*>(key_row(base, s, chunk.begin));
  }

  void open() {
    const int64_t n = chunk.end - chunk.begin;
    if (want_k) start(dk_sum, n, q_slices, spec.D, grads.dk_exact, 1 / spec.scale);
    if (want_v) start(dv_sum, n, v_slices, spec.Dv, grads.dv_exact, 1);
    const S* k_rows = key_row(call.k, spec.k, chunk.begin);
    const int64_t k_step = spec.k.l * chunk.key_step;
    if (chunk.copy_k) copy_operand<O>(k_rows, k_step, spec.k.d, n, spec.D, elements(spec.D), keys);
    if (chunk.copy_v)
      copy_operand<O>(key_row(call.v, spec.v, chunk.begin), spec.v.l * chunk.key_step, spec.v.d, n, spec.Dv,
                      elements(spec.Dv), values);
    if (kPairs && grads.dq)
      copy_transposed_operand<O>(k_rows, k_step, spec.k.d, n, spec.D, spec.D, key_words);
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
    constexpr int64_t panel = kRowSize * P, tile = kTilePanels * panel;
    bool finite = true;
    for (int64_t c = 0; c < q_slices; ++c) finite &= all_finite<O>(q_rows + c * tile, count * panel);
    for (int64_t c = 0; c < v_slices; ++c) finite &= all_finite<O>(dout_rows + c * tile, count * panel);
    finite_rows = finite ? kYes : kNo;
    return finite;
  }

  void load_panel(const Panel& p, State& s, int i) {
    const S* q =
        static_cast<const S*>(call.q) + chunk.batch * spec.q.b + p.head * spec.q.h + p.row * spec.q.l;
    const Strides& g = grads.dout_stride;
    const S* dout = static_cast<const S*>(grads.dout) + chunk.batch * g.b + p.head * g.h + p.row * g.l;
    const int64_t q_step = spec.q.l * chunk.row_step, g_step = g.l * chunk.row_step;
    const uint32_t skipped = load_lanes(p, s);
    if (p.rows < P) clear_panel(s, i);
    pack_operand<O>(q, q_step, spec.q.d, p.rows, spec.D, static_cast<Scalar>(score_factor(spec)), s.queries);
    pack_operand<O>(dout, g_step, g.d, p.rows, spec.Dv, Scalar{1}, s.dout);
    if constexpr (kPairs)
      for (int t = 0; t < P; ++t) spread_nan(s, t);
    else
      for (int64_t d = 0; d < spec.Dv; ++d)
        for (int r = 0; r < P; r += V::N)
          Lanes<V>::store(s.dout + d * P + r,
                          Lanes<V>::load(s.dout + d * P + r) * Lanes<V>::load(factor + r));
    pack_rows(dout, g_step, g.d, p.rows, spec.Dv, dout_rows + i * kRowSize * P);
    for (int t = 0; t < P; ++t) factor[t] = 1;
    pack_rows(q, q_step, spec.q.d, p.rows, spec.D, q_rows + i * kRowSize * P);
    for (int t = 0; t < P && skipped; ++t)
      if (skipped >> t & 1) clear_row(s, i, t);
    for (int64_t d = 0; d < spec.D * P; ++d) s.dq[d] = 0;
    s.span = 0;
  }

  // Moves NaN from a lane's factor to its queries: a masked weight of 0 times NaN would be NaN.
  void spread_nan(State& s, int t) const {
    if (s.weight_factor[t] == s.weight_factor[t]) return;
    s.weight_factor[t] = 1;
    for (int64_t d = 0; d < elements(spec.D); ++d) s.queries[d * P + t] = 0x7FC07FC0;
  }

  // Packs rows into slices of P columns. Rows of singles are multiplied by `factor`.
  void pack_rows(const S* source, int64_t row_stride, int64_t col_stride, int rows, int64_t cols,
                 Element* slices) {
    constexpr int64_t tile = kTilePanels * P;
    if constexpr (!kPairs)
      return pack_slices<V>(source, row_stride, col_stride, rows, cols, factor, tile, slices);
    else
      for (int64_t c = 0; c < cols; c += P, slices += elements(tile) * P) {
        for (int64_t i = 0; i < kRowSize * P && c + P > cols; ++i) slices[i] = 0;
        interleave_rows(source + c * col_stride, row_stride, col_stride, rows, c + P < cols ? P : cols - c, P,
                        slices);
      }
  }

  // Loads each lane's shift, delta and the factor of its dout, or of its weights for pairs. Lanes beyond the
  // rows get zeros. Returns the set of skipped rows: fully masked rows and the exact rows that forward
  // marked. They get a large shift, which makes their weights 0.
  uint32_t load_lanes(const Panel& p, State& s) {
    const int64_t rows = spec.B * spec.Hq * spec.Lq, head = chunk.batch * spec.Hq + p.head;
    const Scalar* shift = static_cast<const Scalar*>(grads.stats) + head * spec.Lq + p.row;
    const Scalar* delta = static_cast<const Scalar*>(grads.delta) + head * spec.Lq + p.row;
    uint32_t skipped = 0;
    for (int t = 0; t < P; ++t) {
      const int64_t row = t * chunk.row_step;
      const bool valid = t < p.rows && !(shift[rows + row] <= 0);
      // Factors of weights must not be 0 where all weights are dropped: delta has weights, too.
      const Scalar scale = kPairs && spec.keep_scale == 0 ? 1 : static_cast<Scalar>(spec.keep_scale);
      factor[t] = valid ? scale / shift[rows + row] : 0;
      s.weight_factor[t] = factor[t];
      s.delta[t] = valid ? delta[row] / (kPairs ? scale : shift[rows + row]) : 0;
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
    for (int64_t d = 0; d < elements(spec.D); ++d) s.queries[d * P + t] = 0;
    for (int64_t d = 0; d < elements(spec.Dv); ++d) s.dout[d * P + t] = 0;
    for (int64_t d = 0; d < q_slices * P; ++d) clear_number(element(q_rows, i, t, d), t);
    for (int64_t d = 0; d < v_slices * P; ++d) clear_number(element(dout_rows, i, t, d), t);
  }

  // Returns the element that holds number d of row t of panel i.
  static Element& element(Element* rows, int i, int t, int64_t d) {
    return rows[((d / P * kTilePanels + i) * kRowSize + t / O::kTerms) * P + d % P];
  }

  // Number `index` of a sequence whose elements hold O::kTerms each, and setting it to 0.
  static Scalar number(Element x, int64_t index) {
    if constexpr (kPairs) return as<float>(index & 1 ? x & 0xFFFF0000 : x << 16);
    return static_cast<Scalar>(x);
  }
  static void clear_number(Element& x, int64_t index) {
    if constexpr (kPairs)
      x &= index & 1 ? 0xFFFF : 0xFFFF0000;
    else
      x = 0;
  }

  void clear_panel(State& s, int i) {
    for (int64_t d = 0; d < elements(spec.D) * P; ++d) s.queries[d] = 0;
    for (int64_t d = 0; d < elements(spec.Dv) * P; ++d) s.dout[d] = 0;
    for (int64_t c = 0; c < q_slices; ++c)
      for (int64_t d = 0; d < kRowSize * P; ++d) q_rows[(c * kTilePanels + i) * kRowSize * P + d] = 0;
    for (int64_t c = 0; c < v_slices; ++c)
      for (int64_t d = 0; d < kRowSize * P; ++d) dout_rows[(c * kTilePanels + i) * kRowSize * P + d] = 0;
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
    ScoreOptions<V, true> options =
        load_options<V, S, true>(spec, call, at, spans, partial, from, to, biases, lanes);
    options.cap_slopes = cap_slopes;
    const V shift[2] = {Lanes<V>::load(s.shift), Lanes<V>::load(s.shift + V::N)};
    const V norm[2] = {Lanes<V>::load(s.weight_factor), Lanes<V>::load(s.weight_factor + V::N)};
    compute_weights<O>(options, shift, norm, k + first_key * ldk, ldk, n, s.queries, elements(spec.D), w);
    if (spec.drop_below)
      drop<V, Negated>(s.low, s.high, call.origin.key + at.key, at.key_step, spec.drop_below, n, w);
    if (want_ds) {
      const V delta[2] = {Lanes<V>::load(s.delta), Lanes<V>::load(s.delta + V::N)};
      const auto compute = spec.drop_below ? compute_ds<O, true, V> : compute_ds<O, false, V>;
      compute(options, delta, v + first_key * ldv, ldv, n, s.dout, elements(spec.Dv), w, g);
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
    const auto is_long = [](const Span* r) { return r->lanes == kAllLanes && r->end - r->begin >= P; };
    while (from < to) {
      const Span* first = span;
      int64_t stop;
      bool partial = false;
      do {
        partial |= span->lanes != kAllLanes;
        stop = span->end < to ? span->end : to;
        ++span;
      } while (stop < to && !is_long(first) && !is_long(span));
      compute_weights_and_ds(p, s, first, begin, from, stop, partial, w, g);
      from = stop;
    }
  }

  // Returns whether keys inside spans may be masked by a bias of -inf. Only their weight of 0 shows
  // that they are masked.
  bool bias_may_mask() const { return has_bias_block(spec); }

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
    if constexpr (kPairs) {
      const bool odd = (from - begin) & 1;
      const Element* rows = key_words + (from - chunk.begin) / 2 * spec.D;
      pair_keys(g + (from - begin) * P, odd, to - from, ds_words);
      const int64_t words = elements(odd + to - from);
      // The first and the last word may hold a key outside of the spans.
      if (masked_keys_are_finite(spans, from, to) && all_finite<O>(rows, spec.D) &&
          all_finite<O>(rows + (words - 1) * spec.D, spec.D))
        return add_values<O>(rows, spec.D, (from - begin) / 2, words, ds_words, spec.D, s.dq);
      return add_query_gradients_by_pair(p, s, from - odd, to, rows);
    } else {
      const Element* rows = k + (from - chunk.begin) * ldk;
      if (masked_keys_are_finite(spans, from, to))
        return add_values<O>(rows, ldk, from - begin, to - from, g + (from - begin) * P, spec.D, s.dq);
      visit_pairs(p, from, to, [&](int64_t key, int t) {
        const Scalar x = g[(key - begin) * P + t];
        for (int64_t d = 0; d < spec.D && !(bias_may_mask() && x == 0); ++d)
          s.dq[d * P + t] += x * k[(key - chunk.begin) * ldk + d];
      });
    }
  }

  // sum + x * y as a product of pairs computes it.
  static Scalar add_product(Scalar sum, Scalar x, Scalar y) {
    const auto flush = [](Scalar a) { return fabs(a) < Scalar{__FLT_MIN__} ? 0 : a; };
    return flush(fma_once(flush(x), flush(y), sum));
  }

  // Calls visit(index) for [0, n), n even, in the order in which products of pairs are summed.
  template <class Visit>
  static void visit_odd_first(int64_t n, Visit visit) {
    for (int64_t i = 0; i < n; i += 2) visit(i + 1), visit(i);
  }

  // Lists the lanes that may attend to each key of [from, to).
  static void list_lanes(const Panel& p, int64_t from, int64_t to, uint32_t* lanes) {
    for (int64_t key = from; key < to; ++key) lanes[key - from] = 0;
    for (const Span* r = p.spans; r < p.spans + p.n_spans; ++r)
      for (int64_t key = r->begin > from ? r->begin : from; key < r->end && key < to; ++key)
        lanes[key - from] = r->lanes;
  }

  // Adds ds_words * rows, the words of keys [from, to), to dq. Skips masked pairs, and has the bits of
  // add_values with zeros in their place.
  void add_query_gradients_by_pair(const Panel& p, State& s, int64_t from, int64_t to, const Element* rows) {
    uint32_t lanes[kKeys + 1];
    list_lanes(p, from, round_up(to, 2), lanes);
    for (int t = 0; t < p.rows; ++t)
      for (int64_t d = 0; d < spec.D; ++d) {
        Scalar sum = 0;
        visit_odd_first(round_up(to - from, 2), [&](int64_t c) {
          const Scalar x = number(ds_words[c / 2 * P + t], c);
          if (from + c < to && (lanes[c] >> t & 1) && !(bias_may_mask() && x == 0))
            sum = add_product(sum, x, number(rows[c / 2 * spec.D + d], c));
        });
        s.dq[d * P + t] += sum;
      }
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
  bool masked_keys_are_finite(const Span* spans, int64_t from, int64_t to) const {
    bool finite = true;
    for (int64_t key = from; key < to; ++spans) {
      const int64_t stop = spans->end < to ? spans->end : to;
      const bool partial = bias_may_mask() || spans->lanes != kAllLanes;
      for (; partial && key < stop; ++key)
        finite &= all_finite<O>(k + (key - chunk.begin) * ldk, elements(spec.D));
      key = stop;
    }
    return finite;
  }

  // Adds to dk or dv of the block that begins `first_key` keys into the chunk. active[tile] is the
  // set of panels that attend to the tile's keys.
  void add_key_gradients(int64_t first_key, int64_t n, const uint32_t* active, const Element* a,
                         const Element* rows, int64_t slices, Scalar* sum) {
    for (int64_t c = 0; c < slices; ++c)
      for (int64_t tile = 0; tile * kRows < n; ++tile) {
        const int64_t first = tile * kRows, left = n - first < kRows ? n - first : kRows;
        if (active[tile])
          add_lanes<O>(left, a + first * kRowSize, kKeys * kRowSize, active[tile],
                       rows + c * kTilePanels * kRowSize * P, sum + (first_key + first) * slices * P + c * P,
                       slices * P);
      }
  }

  // Like add_key_gradients, but skips masked pairs: 0 times a NaN in the query's row would be NaN.
  void add_key_gradients_by_pair(const Panel* panels, int count, int64_t begin, int64_t end, const Element* a,
                                 Element* rows, int64_t slices, Scalar* sum) {
    if constexpr (kPairs) {
      uint32_t lanes[kTilePanels][kKeys];
      for (int i = 0; i < count; ++i) list_lanes(panels[i], begin, end, lanes[i]);
      for (int64_t c = 0; c < end - begin; ++c)
        for (int64_t d = 0; d < slices * P; ++d) {
          Scalar total = 0;
          visit_odd_first(count * P, [&](int64_t row) {
            const int i = static_cast<int>(row / P), t = static_cast<int>(row % P);
            if (!(lanes[i][c] >> t & 1) || t >= panels[i].rows) return;
            const Scalar x = number(a[(i * kKeys + c) * kRowSize + t / 2], t);
            if (!(bias_may_mask() && x == 0))
              total = add_product(total, x, number(element(rows, i, t, d), t));
          });
          sum[(begin - chunk.begin + c) * slices * P + d] += total;
        }
    } else {
      for (int i = 0; i < count; ++i)
        visit_pairs(panels[i], begin, end, [&](int64_t key, int t) {
          const Scalar x = a[i * kBlockSize + (key - begin) * P + t];
          for (int64_t d = 0; d < slices * P && !(bias_may_mask() && x == 0); ++d)
            sum[(key - chunk.begin) * slices * P + d] += x * element(rows, i, t, d);
        });
    }
  }

  void zero_rows(int panel, int64_t from, int64_t to) {
    const int64_t first = panel * kKeys * kRowSize;
    for (int64_t i = first + from * kRowSize; i < first + to * kRowSize; ++i) weight_rows[i] = ds_rows[i] = 0;
  }

  // Processes one panel and the block [begin, end). Returns whether all its rows attend to the
  // whole block.
  bool process_panel(const Panel& p, State& s, int panel, int64_t begin, int64_t end, uint32_t* active) {
    const int64_t first_row = panel * kKeys;
    Scalar *w = weights + (kPairs ? 0 : first_row * P), *g = ds + (kPairs ? 0 : first_row * P);
    bool covers_block = false;
    visit_spans(p, s.span, begin, end, kAllLanes,
                [&](const Span* first, int64_t from, int64_t to, bool partial) {
                  mark_active(panel, from - begin, to - begin, end - begin, active);
                  process_spans(p, s, first, begin, from, to, w, g);
                  if constexpr (kPairs) round_rows(first_row, w, g, from - begin, to - begin);
                  if (grads.dq && !chunk.bias_only) add_query_gradients(p, s, first, begin, from, to, g);
                  covers_block = !partial && from == begin && to == end;
                });
    return covers_block;
  }

  // Rounds rows [from, to) of weights and ds to words of two queries.
  void round_rows(int64_t first_row, const Scalar* w, const Scalar* g, int64_t from, int64_t to) {
    const auto round = [&](const Scalar* rows, Element* words) {
      words += (first_row + from) * kRowSize;
      for (int64_t i = from * P; i < to * P; i += P, words += kRowSize)
        Lanes<O>::store(words, narrow(Lanes<V>::load(rows + i), Lanes<V>::load(rows + i + V::N)));
    };
    if (want_v) round(w, weight_rows);
    if (want_k) round(g, ds_rows);
  }

  // Adds the panel to `active` for the tiles of keys [from, to), and zeros its weights and ds for
  // the other keys of these tiles.
  void mark_active(int panel, int64_t from, int64_t to, int64_t n, uint32_t* active) {
    const int64_t first = from / kRows, last = (to - 1) / kRows;
    if (!(active[first] >> panel & 1)) zero_rows(panel, first * kRows, from);
    const int64_t stop = (last + 1) * kRows;
    zero_rows(panel, to, stop < n ? stop : n);
    for (int64_t tile = first; tile <= last; ++tile) active[tile] |= 1u << panel;
  }

  void block(const Panel* panels, int count, int64_t begin, int64_t end) {
    uint32_t active[kKeyTiles] = {};
    bool all_full = spec.bias == kNoBias || spec.bias == kAlibi;
    for (int i = 0; i < count; ++i) all_full &= process_panel(panels[i], states[i], i, begin, end, active);
    const int64_t first_key = begin - chunk.begin, n = end - begin;
    if (all_full || rows_are_finite(count)) {
      if (want_v) add_key_gradients(first_key, n, active, weight_rows, dout_rows, v_slices, dv_sum);
      if (want_k) add_key_gradients(first_key, n, active, ds_rows, q_rows, q_slices, dk_sum);
    } else {
      if (want_v)
        add_key_gradients_by_pair(panels, count, begin, end, weight_rows, dout_rows, v_slices, dv_sum);
      if (want_k) add_key_gradients_by_pair(panels, count, begin, end, ds_rows, q_rows, q_slices, dk_sum);
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
