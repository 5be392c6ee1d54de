// Decode: few query rows attend to many stored keys. `run` computes the partial results of a run of
// splits, at most 512 keys each, for all query rows of its group; `finish` merges the partial
// results of all splits. Loop order: sets of 64 rows; for each set all scores of the run, then the
// softmax of each row in each split, then all values. So K and V are each read from one end to the
// other, in tiles of 32 keys. Blocks of up to 4 rows share the loaded keys, with lanes along D. If
// there are enough rows to fill panels, the lanes are rows, and tiles have 96 keys.
#include "kernels/exact.inl.h"
#include "kernels/gemm.inl.h"
#include "kernels/rows.inl.h"
#include "kernels/stored.inl.h"

namespace {

// Query rows that share each loaded vector of a key or value.
template <class V>
constexpr int kRowBlock = V::N < 4 ? V::N : 4;

// Vectors of sums that fit the registers: AVX-512 has twice as many as AVX2.
template <class V>
constexpr int kSums = sizeof(V) == 64 ? 16 : 8;

// Sums of `Keys` keys and R queries along D, in vectors that cover a cache line: [part][query][key].
template <class V, int R, int Keys, class Row>
using Sums = V[Row::kParts][R][Keys];

// Multiplies R queries by adjacent keys. If the sums of all parts of the cache lines do not fit the
// registers, each part has its own pass.
template <class V, int R, int Keys, class K>
REGARD_INLINE void multiply(const Number<V>* queries, int64_t ldq, const FloatRow<V, K> (&keys)[Keys],
                            int64_t D, Sums<V, R, Keys, FloatRow<V, K>>& sums) {
  using Row = FloatRow<V, K>;
  constexpr int kWidth = Row::kWidth, kParts = Row::kParts;
  constexpr int kTogether = R * Keys * kParts <= kSums<V> ? kParts : 1;  // parts of a pass
  const int64_t whole = D / kWidth * kWidth;
  UNROLLED (first, kParts) {
    if (first % kTogether) continue;
    auto& sum = reinterpret_cast<V(&)[kTogether][R][Keys]>(sums[first]);
    UNROLLED (i, kTogether * R * Keys) sum[i / (R * Keys)][i / Keys % R][i % Keys] = Lanes<V>::zero();
    // Adds the products of elements `at` of the queries and d of the keys, and of those behind them.
    const auto step = [&](int64_t at, const Row(&key)[Keys], int64_t d) REGARD_ALWAYS {
      UNROLLED (part, kTogether) {
        const int lane = (first + part) * V::N;
        V q[R];
        UNROLLED (r, R) q[r] = Lanes<V>::load(queries + r * ldq + at + lane);
        UNROLLED (c, Keys) {
          const V k = key[c].load(d + lane);
          UNROLLED (r, R) sum[part][r][c] = fma(q[r], k, sum[part][r][c]);
        }
      }
    };
    int64_t d = 0;
    for (; d + 4 * kWidth <= whole; d += 4 * kWidth) {
      UNROLLED (i, 4) step(d + i * kWidth, keys, d + i * kWidth);
    }
    for (; d < whole; d += kWidth) step(d, keys, d);
    if (d == D) continue;
    K tail[Keys][kWidth] = {};
    Row rest[Keys];
    for (int c = 0; c < Keys; ++c) {
      for (int64_t i = d; i < D; ++i) tail[c][i - d] = keys[c].data[i];
      rest[c] = {tail[c], 0};
    }
    step(d, rest, 0);
  }
}

// Quantised keys. With one query, scale after summing a group if that is faster; with several,
// dequantise once and share.
template <class V, int R, int Keys, StoreKind Kind>
REGARD_INLINE void multiply(const Number<V>* queries, int64_t ldq, const CodeRow<V, Kind> (&keys)[Keys],
                            int64_t D, Sums<V, R, Keys, CodeRow<V, Kind>>& sums) {
  using Row = CodeRow<V, Kind>;
  auto& sum = sums[0];
  UNROLLED (i, R * Keys) sum[i / Keys][i % Keys] = Lanes<V>::zero();
  for (int64_t g = 0; g * kGroup < D; ++g) {
    const Number<V>* q = queries + g * kGroup;
    UNROLLED (c, Keys) keys[c].prefetch(g);
    if constexpr (R == 1 && Row::kScalesLate) {
      V query_sum = Lanes<V>::load(q);
#pragma GCC unroll 8
      for (int i = V::N; i < kGroup; i += V::N) query_sum = query_sum + Lanes<V>::load(q + i);
      UNROLLED (c, Keys) {
        V products = Lanes<V>::zero();
        UNROLLED (u, Row::kUnits) {
          V x[Row::kVectors];
          keys[c].load(g, u, x);
          UNROLLED (n, Row::kVectors) products = fma(Lanes<V>::load(q + Row::channel(u, n)), x[n], products);
        }
        sum[0][c] = fma(products, keys[c].scale(g), sum[0][c]);
        if constexpr (Kind == kInt4) sum[0][c] = fma(query_sum, keys[c].low(g), sum[0][c]);
      }
    } else {
      UNROLLED (u, Row::kUnits) {
        V x[Keys][Row::kVectors];
        UNROLLED (c, Keys) keys[c].load_dequantised(g, u, x[c]);
        UNROLLED (t, R * Row::kVectors) {
          const int r = t / Row::kVectors, n = t % Row::kVectors;
          const V query = Lanes<V>::load(q + r * ldq + Row::channel(u, n));
          UNROLLED (c, Keys) sum[r][c] = fma(query, x[c][n], sum[r][c]);
        }
      }
    }
  }
}

// Returns the sums of the lanes of V::N sums, in an order that does not depend on V::N.
template <class V, int Parts>
REGARD_INLINE V add_parts(V (&sums)[Parts][V::N]) {
  V total[Parts];
  UNROLLED (part, Parts) total[part] = lane_sums(sums[part]);
  for (int step = 1; step < Parts; step *= 2)
    for (int i = 0; i + step < Parts; i += 2 * step) total[i] = total[i] + total[i + step];
  return total[0];
}

// Stores the scores of R queries and the first n of V::N / R keys: lane r * V::N / R + i is query r
// and key i.
template <class V, int R>
REGARD_INLINE void store_scores(V dot_products, int64_t n, Number<V>* scores, int64_t ld_scores) {
  constexpr int C = V::N / R;
  if (R == 1 && n >= C) return Lanes<V>::store(scores, dot_products);
  Number<V> lane[V::N];
  Lanes<V>::store(lane, dot_products);
  UNROLLED (r, R)
    UNROLLED (i, C)
      if (i < n) scores[r * ld_scores + i] = lane[r * C + i];
}

// sums[part][c] += query[d : d + Vectors * V::N] * keys[c]. Reads one row after the other, with the
// query in registers: so the keys are one stream, which the hardware prefetcher follows.
template <class V, int Vectors, class K>
REGARD_INLINE void multiply_rows(const Number<V>* query, const FloatTile<V, K>& keys, int64_t d, int64_t n,
                                 V (*sums)[kTileKeys]) {
  constexpr int kParts = FloatRow<V, K>::kParts;
  V q[Vectors];
  UNROLLED (i, Vectors) q[i] = Lanes<V>::load(query + i * V::N);
#pragma GCC unroll 2
  for (int64_t c = 0; c < n; ++c) {
    const FloatRow<V, K> row = keys.row(c);
    V sum[kParts];
    UNROLLED (part, kParts) sum[part] = sums[part][c];
    UNROLLED (i, Vectors) {
      if (i * V::N % row.kLine == 0) row.prefetch(d + i * V::N);
      sum[i % kParts] = fma(q[i], row.load(d + i * V::N), sum[i % kParts]);
    }
    UNROLLED (part, kParts) sums[part][c] = sum[part];
  }
}

// Computes the scores of one query and at most kTileKeys keys. `query` is padded with zeros.
template <class V, class K>
void score_row(const Number<V>* query, int64_t D, const FloatTile<V, K>& keys, int64_t n, Number<V>* scores) {
  constexpr int kParts = FloatRow<V, K>::kParts, kWidth = FloatRow<V, K>::kWidth, kVectors = 8;
  V sums[kParts][kTileKeys];
  for (int64_t c = 0; c < round_up(n, V::N); ++c)
    UNROLLED (part, kParts) sums[part][c] = Lanes<V>::zero();
  int64_t d = 0;
  for (; d + kVectors * V::N <= D; d += kVectors * V::N)
    multiply_rows<V, kVectors>(query + d, keys, d, n, sums);
  for (; d + kVectors / 2 * V::N <= D; d += kVectors / 2 * V::N)
    multiply_rows<V, kVectors / 2>(query + d, keys, d, n, sums);
  for (; d + kWidth <= D; d += kWidth) multiply_rows<V, kParts>(query + d, keys, d, n, sums);
  if (d < D) {
    K tail[kTileKeys * kWidth] = {};
    for (int64_t c = 0; c < n; ++c)
      for (int64_t i = d; i < D; ++i) tail[c * kWidth + i - d] = keys.row(c).data[i];
    multiply_rows<V, kParts>(query + d, FloatTile<V, K>{tail, kWidth, 0}, 0, n, sums);
  }
  for (int64_t c = 0; c < n; c += V::N) {
    V block[kParts][V::N];
    UNROLLED (part, kParts)
      for (int i = 0; i < V::N; ++i) block[part][i] = sums[part][c + i];
    store_scores<V, 1>(add_parts<V>(block), n - c, scores + c, 0);
  }
}

// Computes scores[R][ld_scores] of R queries and a tile of n keys, V::N scores at a time: score
// r * C + i of these belongs to query r and key i.
template <class V, int R, class Tile>
void score_tile(const Number<V>* queries, int64_t ldq, int64_t D, const Tile& keys, int64_t n,
                Number<V>* scores, int64_t ld_scores) {
  using Row = typename Tile::Row;
  if constexpr (R == 1 && Row::kFloats) {
    for (int64_t c = 0; c < n; c += kTileKeys)
      score_row<V>(queries, D, keys.from(c), n - c < kTileKeys ? n - c : kTileKeys, scores + c);
    return;
  }
  constexpr int C = V::N / R, Keys = C < Row::kAdjacent ? C : Row::kAdjacent;
  for (int64_t c = 0; c < n; c += C) {
    V sums[Row::kParts][V::N];
    for (int i = 0; i < C; i += Keys) {
      Row key[Keys];
      for (int k = 0; k < Keys; ++k) key[k] = keys.row(c + i + k < n ? c + i + k : n - 1);
      if constexpr (Row::kFloats)
        for (const Row& row : key)
          for (int64_t d = 0; d < D; d += Row::kLine) row.prefetch(d);
      Sums<V, R, Keys, Row> sum;
      multiply<V, R, Keys>(queries, ldq, key, D, sum);
      UNROLLED (part, Row::kParts)
        UNROLLED (t, R * Keys) sums[part][t / Keys * C + i + t % Keys] = sum[part][t / Keys][t % Keys];
    }
    store_scores<V, R>(add_parts<V>(sums), n - c, scores + c, ld_scores);
  }
}

template <class V>
REGARD_INLINE void add_to(Number<V>* at, V x) {
  Lanes<V>::store(at, Lanes<V>::load(at) + x);
}

// out[R][d : d + Vectors * V::N] += weights[R][n] * values[n]. Prefetches the first `width` elements of
// the rows of the next tile.
template <class V, int R, int Vectors, class K>
REGARD_INLINE void add_columns(const Number<V>* weights, int64_t ld_weights, const FloatTile<V, K>& values,
                               int64_t d, int64_t n, int64_t width, Number<V>* out, int64_t ldo) {
  V sum[R][Vectors];
  UNROLLED (r, R)
    UNROLLED (i, Vectors) sum[r][i] = Lanes<V>::zero();
  for (int64_t c = 0; c < n; ++c) {
    const FloatRow<V, K> row = values.row(c);
    for (int64_t line = 0; line < width; line += row.kLine) row.prefetch(line);
    V w[R];
    UNROLLED (r, R) w[r] = Lanes<V>::set(weights[r * ld_weights + c]);
    UNROLLED (i, Vectors) {
      const V v = row.load(d + i * V::N);
      UNROLLED (r, R) sum[r][i] = fma(w[r], v, sum[r][i]);
    }
  }
  UNROLLED (r, R)
    UNROLLED (i, Vectors) add_to(out + r * ldo + d + i * V::N, sum[r][i]);
}

// The same for quantised values, for `Units` units (of CodeRow) from unit `first` on. With one row,
// scale the weight if that is faster; with several rows, dequantise once and share.
template <class V, int R, int Units, StoreKind Kind>
REGARD_INLINE void add_columns(const Number<V>* weights, int64_t ld_weights, const CodeTile<V, Kind>& values,
                               int64_t first, int64_t n, Number<V>* out, int64_t ldo) {
  using Row = CodeRow<V, Kind>;
  constexpr bool kLate = R == 1 && Row::kScalesLate;
  V sum[R][Units][Row::kVectors], low_sums[Units];
  UNROLLED (u, Units) {
    low_sums[u] = Lanes<V>::zero();
    UNROLLED (t, R * Row::kVectors) sum[t / Row::kVectors][u][t % Row::kVectors] = low_sums[u];
  }
  for (int64_t c = 0; c < n; ++c) {
    const Row row = values.row(c);
    V w[R];
    UNROLLED (r, R) w[r] = Lanes<V>::set(weights[r * ld_weights + c]);
    V factor = w[0];
    UNROLLED (u, Units) {
      const int64_t group = (first + u) / Row::kUnits;
      const int unit = static_cast<int>((first + u) % Row::kUnits);
      if (kLate && u % Row::kUnits == 0) {
        factor = w[0] * row.scale(group);
        if constexpr (Kind == kInt4) low_sums[u] = fma(w[0], row.low(group), low_sums[u]);
      }
      if (unit == 0) row.prefetch(group);
      V x[Row::kVectors];
      if constexpr (kLate)
        row.load(group, unit, x);
      else
        row.load_dequantised(group, unit, x);
      UNROLLED (i, Row::kVectors)
        UNROLLED (r, R) sum[r][u][i] = fma(kLate ? factor : w[r], x[i], sum[r][u][i]);
    }
  }
  UNROLLED (u, Units) {
    const int64_t group = (first + u) / Row::kUnits;
    const int unit = static_cast<int>((first + u) % Row::kUnits);
    UNROLLED (t, R * Row::kVectors) {
      const int r = t / Row::kVectors, i = t % Row::kVectors;
      const V low_sum = low_sums[u - u % Row::kUnits];
      add_to(out + r * ldo + group * kGroup + Row::channel(unit, i), sum[r][u][i] + low_sum);
    }
  }
}

// out[R][Dv] += weights[R][n] * values[n][Dv]
template <class V, int R, class K>
void add_tile(const Number<V>* weights, int64_t ld_weights, const FloatTile<V, K>& values, int64_t n,
              Number<V>* out, int64_t ldo, int64_t Dv) {
  constexpr int Vectors = R == 1 ? 8 : kSums<V> / R;
  int64_t d = 0;
  for (; d + Vectors * V::N <= Dv; d += Vectors * V::N)
    add_columns<V, R, Vectors>(weights, ld_weights, values, d, n, d ? 0 : Dv, out, ldo);
  for (; d + Vectors / 2 * V::N <= Dv; d += Vectors / 2 * V::N)
    add_columns<V, R, Vectors / 2>(weights, ld_weights, values, d, n, d ? 0 : Dv, out, ldo);
  for (; d + V::N <= Dv; d += V::N)
    add_columns<V, R, 1>(weights, ld_weights, values, d, n, d ? 0 : Dv, out, ldo);
  for (; d < Dv; ++d)
    for (int r = 0; r < R; ++r) {
      double sum = 0;
      for (int64_t c = 0; c < n; ++c)
        sum +=
            static_cast<double>(weights[r * ld_weights + c]) * static_cast<double>(values.row(c).element(d));
      out[r * ldo + d] += static_cast<Number<V>>(sum);
    }
}

template <class V, int R, StoreKind Kind>
void add_tile(const Number<V>* weights, int64_t ld_weights, const CodeTile<V, Kind>& values, int64_t n,
              Number<V>* out, int64_t ldo, int64_t Dv) {
  using Row = CodeRow<V, Kind>;
  constexpr int kUnits = Row::kUnits, kMax = (R == 1 ? 8 : kSums<V>) / R / Row::kVectors;
  constexpr int Units = R == 1 ? (kMax < kUnits ? kUnits : kMax / kUnits * kUnits) : kMax > 0 ? kMax : 1;
  const int64_t units = round_up(Dv, kGroup) / kGroup * kUnits;
  int64_t u = 0;
  for (; u + Units <= units; u += Units)
    add_columns<V, R, Units>(weights, ld_weights, values, u, n, out, ldo);
  constexpr int kTail = R == 1 ? kUnits : 1;
  for (; u < units; u += kTail) add_columns<V, R, kTail>(weights, ld_weights, values, u, n, out, ldo);
}

// Calls work(RowCount<R>, first row) for blocks that cover rows [r, rows).
template <class V, class Work>
inline void visit_row_blocks(int64_t r, int64_t rows, Work work) {
  for (; r + kRowBlock<V> <= rows; r += kRowBlock<V>) work(RowCount<kRowBlock<V>>{}, r);
  for (; r + 2 <= rows; r += 2) work(RowCount<2>{}, r);
  for (; r < rows; ++r) work(RowCount<1>{}, r);
}

// Keys in a tile if rows are in panels. With AVX2, the sum over a whole tile stays in registers.
constexpr int64_t kPanelKeys = 96;

// Rows that are processed together, and their scores. The scores of a run stay in L2.
constexpr int64_t kRowSet = 64, kRunScores = 16 << 10;

// Returns how many rows go into panels. An incomplete last panel pays off only if it is at least
// three quarters full.
template <class V>
inline int64_t rows_for_panels(int64_t rows) {
  constexpr int64_t P = kPanel<V>;
  const int64_t left = rows % P;
  return 4 * left >= 3 * P ? rows : rows - left;
}

template <class V, class S>
struct Decode {
  using Scalar = Number<V>;
  static constexpr int P = kPanel<V>;

  // The partial result of a split: each row's softmax shift and sum and its unnormalised output.
  struct Partial {
    Scalar *shift, *total, *out;
  };

  const Run& run;
  const Spec& spec;
  const Call& call;
  int64_t ldq, ldo;            // row strides of queries and outputs, rounded up to whole groups
  int64_t group, all_rows;     // row r is query r % Lq of head r / Lq of the group
  int64_t first = 0, rows;     // the current set is rows [first, first + rows)
  int64_t rows_in_panels = 0;  // the first rows of the set, up to this many, are in panels
  int64_t ld_scores;           // row stride of scores: the keys of all splits
  Stored<V, S> keys, values;
  Arena arena;
  Scalar *queries, *scores, *converted, *scales, *sum;
  // [panel][D][P], [panel][Dv][P], scores or weights [key][P]
  Scalar *query_panels, *out_panels, *panel_scores;
  double* exact;

  explicit Decode(const Run& r)
      : run(r), spec(*r.spec), call(*r.call), ldq(round_up(spec.D, kGroup)), ldo(round_up(spec.Dv, kGroup)),
        group(spec.Hq / spec.Hkv), all_rows(group * spec.Lq), rows(max_rows(spec)),
        rows_in_panels(rows_for_panels<V>(rows)), ld_scores(run.n_splits * kSplitKeys),
        keys(Stored<V, S>::keys(r)), values(Stored<V, S>::values(r)), arena{static_cast<char*>(r.scratch)} {
    const int64_t width = spec.D > spec.Dv ? spec.D : spec.Dv;
    queries = arena.take<Scalar>(rows * ldq);
    converted = arena.take<Scalar>(Stored<V, S>::tile_size(width, tile_keys(rows)));
    scales = arena.take<Scalar>(Stored<V, S>::scales_size(width, tile_keys(rows)));
    sum = arena.take<Scalar>(spec.Dv);
    exact = arena.take<double>(spec.Dv);
    query_panels = arena.take<Scalar>(panels() * P * spec.D);
    out_panels = arena.take<Scalar>(panels() * P * spec.Dv);
    panel_scores = arena.take<Scalar>(rows_in_panels ? P * kPanelKeys : 0);
    scores = arena.take<Scalar>(rows * ld_scores);  // last: `finish` has more splits, but no scores
  }

  static int64_t max_rows(const Spec& s) {
    const int64_t rows = s.Hq / s.Hkv * s.Lq;
    return rows < kRowSet ? rows : kRowSet;
  }
  int64_t panels() const { return (rows_in_panels + P - 1) / P; }
  static int64_t tile_keys(int64_t rows) { return rows_for_panels<V>(rows) ? kPanelKeys : kTileKeys; }

  static int64_t max_splits(const Spec& s) {
    const int64_t splits = kRunScores / (max_rows(s) * kSplitKeys);
    return splits > 1 ? splits : 1;
  }

  static int64_t scratch_bytes(const Spec& s, int64_t splits) {
    const int64_t rows = max_rows(s), width = s.D > s.Dv ? s.D : s.Dv;
    const int64_t n = tile_keys(rows), lanes = round_up(rows_for_panels<V>(rows), P);
    const int64_t scalars = rows * (round_up(s.D, kGroup) + splits * kSplitKeys) +
                            Stored<V, S>::tile_size(width, n) + Stored<V, S>::scales_size(width, n) +
                            3 * s.Dv + lanes * (s.D + s.Dv) + (lanes ? P * kPanelKeys : 0);
    return scalars * sizeof(Scalar) + 9 * 64;
  }

  static int64_t partial_bytes(const Spec& s) {
    const int64_t rows = s.Hq / s.Hkv * s.Lq;
    return round_up(rows * (round_up(s.Dv, kGroup) + 2) * sizeof(Scalar), 64);
  }

  Partial partial(int64_t index) const {
    Scalar* data = reinterpret_cast<Scalar*>(static_cast<char*>(run.partials) + index * partial_bytes(spec));
    return {data, data + all_rows, data + 2 * all_rows};
  }

  int64_t head(int64_t r) const { return run.kv_head * group + r / spec.Lq; }
  int lane(int64_t r) const { return static_cast<int>(r % spec.Lq); }
  const SpanList& spans(int64_t r) const { return run.spans[run.by_head ? r / spec.Lq : 0]; }

  // Converts key j of the call to the run's numbering.
  int64_t run_key(int64_t j) const { return (j - run.key) / run.key_step; }

  RowCoords coords(int64_t r, int64_t begin) const {
    const int64_t offset = call.offsets ? call.offsets[run.batch] : call.offset;
    return {run.batch, head(r), lane(r), offset + lane(r), run.key + begin * run.key_step, run.key_step};
  }

  const S* query(int64_t r) const {
    return static_cast<const S*>(call.q) + run.batch * spec.q.b + head(r) * spec.q.h + lane(r) * spec.q.l;
  }

  // One run

  void start_queries() {
    const double scale = score_factor(spec);
    for (int64_t r = 0; r < rows; ++r) {
      Scalar* row = queries + r * ldq;
      copy_rows<V>(query(first + r), 0, spec.q.d, 1, spec.D, 0, row);
      for (int64_t d = 0; d < spec.D; ++d) row[d] *= static_cast<Scalar>(scale);
      for (int64_t d = spec.D; d < ldq; ++d) row[d] = 0;
    }
    visit_panels([&](int64_t i, int count) {
      Scalar* panel = query_panels + i * P * spec.D;
      if (count < P)
        for (int64_t d = 0; d < P * spec.D; ++d) panel[d] = 0;
      pack<V>(queries + i * P * ldq, ldq, 1, count, spec.D, Scaled<V>{1}, panel);
    });
  }

  // Calls work(panel index, number of rows) for each panel.
  template <class Work>
  void visit_panels(Work work) const {
    for (int64_t i = 0; i < panels(); ++i)
      work(i, static_cast<int>(rows_in_panels - i * P < P ? rows_in_panels - i * P : P));
  }

  // Calls work(first key, keys, tile) for all keys of split i that some row may attend to.
  template <class Work>
  void visit_key_tiles(int64_t i, Stored<V, S>& stored, Work work) {
    const Split& split = run.splits[i];
    for (int64_t s = 0; s < split.n_any_row; ++s) {
      const int64_t begin = split.any_row[s].begin > split.begin ? split.any_row[s].begin : split.begin;
      const int64_t end = split.any_row[s].end < split.end ? split.any_row[s].end : split.end;
      for (int64_t j = begin, n; j < end; j += n) {
        n = end - j < tile_keys(rows) ? end - j : tile_keys(rows);
        visit_key_tile(stored, j, n, [&](const auto& tile) { work(j - split.begin, n, tile); });
      }
    }
  }

  // Returns the distance from a tile of n keys from j on to the next tile.
  int64_t ahead(const Stored<V, S>& stored, int64_t j, int64_t n) const {
    return j + n < run.splits[run.n_splits - 1].end ? stored.distance(j, j + n) : 0;
  }

  // Reads the tile in place if one block of query rows is its only user. Otherwise converts it once
  // for all blocks.
  template <class Work>
  void visit_key_tile(Stored<V, S>& stored, int64_t j, int64_t n, Work work) {
    int64_t ld = 0;
    if constexpr (sizeof(Scalar) == sizeof(float)) {
      if (spec.store == kInt8 && rows <= kRowBlock<V>)
        if (auto tile = stored.template codes_in_place<kInt8>(j, n, scales); tile.codes)
          return tile.ahead = ahead(stored, j, n), work(tile);
      if (spec.store == kInt4 && rows <= kRowBlock<V>)
        if (auto tile = stored.template codes_in_place<kInt4>(j, n, scales); tile.codes)
          return tile.ahead = ahead(stored, j, n), work(tile);
    }
    if (sizeof(S) == sizeof(Scalar) || rows <= kRowBlock<V>)
      if (const S* data = stored.in_place(j, n, ld))
        return work(FloatTile<V, S>{data, ld, ahead(stored, j, n)});
    const Scalar* data = stored.rows(j, n, converted, scales, ld);
    work(FloatTile<V, Scalar>{data, ld, 0});
  }

  // Scores or weights of split i: row r begins at r * ld_scores.
  Scalar* split_scores(int64_t i) const { return scores + i * kSplitKeys; }

  void score(int64_t i) {
    visit_key_tiles(i, keys, [&](int64_t c, int64_t n, const auto& k) {
      Scalar* target = split_scores(i) + c;
      score_panels(k, n, target);
      visit_row_blocks<V>(rows_in_panels, rows, [&](auto count, int64_t r) {
        score_tile<V, count.value>(queries + r * ldq, ldq, spec.D, k, n, target + r * ld_scores, ld_scores);
      });
    });
  }

  void score_panels(const FloatTile<V, Scalar>& k, int64_t n, Scalar* target) {
    Scalar ones[P];
    for (Scalar& one : ones) one = 1;
    visit_panels([&](int64_t i, int count) {
      multiply_rows<V>(k.data, k.ld, n, query_panels + i * P * spec.D, spec.D, panel_scores,
                       [&](int64_t row, auto& tile) { store_rows(panel_scores + row * P, tile); });
      unpack<V>(panel_scores, n, ones, count, target + i * P * ld_scores, ld_scores, 1, StoreAsIs<V>());
    });
  }

  void add_panels(const FloatTile<V, Scalar>& v, int64_t n, const Scalar* weights) {
    visit_panels([&](int64_t i, int count) {
      pack<V>(weights + i * P * ld_scores, ld_scores, 1, count, n, Scaled<V>{1}, panel_scores);
      ::add_values<V>(v.data, v.ld, 0, n, panel_scores, spec.Dv, out_panels + i * P * spec.Dv);
    });
  }

  // Overloads for tiles that are read in place in another type. They do nothing: `visit_key_tile`
  // yields such tiles only if no rows are in panels.
  template <class Tile>
  void score_panels(const Tile&, int64_t, Scalar*) {}
  template <class Tile>
  void add_panels(const Tile&, int64_t, const Scalar*) {}

  // Turns a row of raw scores of split i into weights: softcap, bias, mask, softmax, dropout.
  void softmax_row(int64_t i, int64_t r, const Partial& p) {
    const Split& split = run.splits[i];
    Scalar* row = split_scores(i) + r * ld_scores;
    const int64_t n = split.end - split.begin, filled = round_up(n, V::N);
    const RowCoords at = coords(first + r, split.begin);
    if (spec.softcap > 0) soft_cap<V>(row, filled, static_cast<Scalar>(spec.softcap * kLog2E));
    if (spec.bias != kNoBias) add_bias<V, S>(spec, call, at, n, row);
    mask_row<V>(spans(first + r), lane(first + r), split.begin, split.end, row);
    const V shift = ceil(Lanes<V>::set(max_of_row<V>(row, filled)));
    p.shift[r] = first_lane(shift);
    p.total[r] = exponentiate_row<V>(row, filled, finite_shift(shift));
    if (spec.drop_below)
      drop_row<V>(dropout_stream(spec, call, run.batch, at.head, at.row), call.origin.key + at.key,
                  at.key_step, spec.drop_below, n, row);
  }

  void add_values(int64_t i, const Partial& p) {
    for (int64_t d = rows_in_panels * ldo; d < rows * ldo; ++d) p.out[d] = 0;
    for (int64_t d = 0; d < panels() * P * spec.Dv; ++d) out_panels[d] = 0;
    visit_key_tiles(i, values, [&](int64_t c, int64_t n, const auto& v) {
      const Scalar* weights = split_scores(i) + c;
      add_panels(v, n, weights);
      visit_row_blocks<V>(rows_in_panels, rows, [&](auto count, int64_t r) {
        add_tile<V, count.value>(weights + r * ld_scores, ld_scores, v, n, p.out + r * ldo, ldo, spec.Dv);
      });
    });
    Scalar ones[P];
    for (Scalar& one : ones) one = 1;
    visit_panels([&](int64_t panel, int count) {
      unpack<V>(out_panels + panel * P * spec.Dv, spec.Dv, ones, count, p.out + panel * P * ldo, ldo, 1,
                StoreAsIs<V>());
    });
  }

  // Returns the partial result of split i of the current set.
  Partial set_partial(int64_t i) const {
    const Partial all = partial(i);
    return {all.shift + first, all.total + first, all.out + first * ldo};
  }

  bool compute() {
    for (first = 0; first < all_rows; first += rows) {
      if (all_rows - first < rows) rows = all_rows - first, rows_in_panels = rows_for_panels<V>(rows);
      start_queries();
      for (int64_t i = 0; i < run.n_splits; ++i) score(i);
      for (int64_t i = 0; i < run.n_splits; ++i)
        for (int64_t r = 0; r < rows; ++r) softmax_row(i, r, set_partial(i));
      for (int64_t i = 0; i < run.n_splits; ++i) add_values(i, set_partial(i));
    }
    return !keys.has_bad_page() && !values.has_bad_page();
  }

  // Merging the splits

  struct MergedSoftmax {
    Scalar shift, total;
    bool only_sink;
  };

  // Sums the partial results of row r, rescaled to the largest shift, in `sum`. The softmax starts
  // with the sink, if there is one.
  MergedSoftmax merge(int64_t r) {
    V first_shift, first_total;
    start_softmax<V>(call, head(r), first_shift, first_total);
    const Scalar sink_shift = first_lane(first_shift);
    Scalar max_shift = sink_shift;
    for (int64_t i = 0; i < run.n_splits; ++i)
      if (const Scalar shift = partial(i).shift[r]; shift > max_shift) max_shift = shift;
    const Scalar shift = first_lane(finite_shift(Lanes<V>::set(max_shift)));
    Scalar total = first_lane(first_total * exp2(first_shift - Lanes<V>::set(shift)));
    bool only_sink = call.sink;
    for (int64_t d = 0; d < spec.Dv; ++d) sum[d] = 0;
    for (int64_t i = 0; i < run.n_splits; ++i) {
      const Partial p = partial(i);
      if (p.total[r] == 0) continue;  // fully masked: output stays zero even if values are NaN
      const Scalar factor = first_lane(exp2(Lanes<V>::set(p.shift[r] - shift)));
      const Scalar *out = p.out + r * ldo, partial_sum = p.total[r] * factor;
      total += partial_sum;
      only_sink &= partial_sum == 0;
      for (int64_t d = 0; d < spec.Dv; ++d) sum[d] += out[d] * factor;
    }
    return {max_shift, total, only_sink};
  }

  // Returns whether the row's sum and output are finite (x - x == 0).
  bool is_finite(const MergedSoftmax& s) const {
    V zero = Lanes<V>::set(s.total - s.total);
    int64_t d = 0;
    for (; d + V::N <= spec.Dv; d += V::N) zero = zero + (Lanes<V>::load(sum + d) - Lanes<V>::load(sum + d));
    for (; d < spec.Dv; ++d) zero = zero + Lanes<V>::set(sum[d] - sum[d]);
    return !bits(differs(zero, zero));
  }

  void write(S* out, Scalar factor) const {
    int64_t d = 0;
    for (; spec.out.d == 1 && d + V::N <= spec.Dv; d += V::N)
      Lanes<V>::store(out + d, Lanes<V>::load(sum + d) * Lanes<V>::set(factor));
    for (; d < spec.Dv; ++d) from_float(out + d * spec.out.d, sum[d] * factor);
  }

  void finish_row(int64_t r, const Task& task) {
    const Panel p{head(r), 0, static_cast<int>(spec.Lq), spans(r).spans, spans(r).count};
    const int t = lane(r);
    const MergedSoftmax s = merge(r);
    S* out = static_cast<S*>(call.out) + run.batch * spec.out.b + p.head * spec.out.h + t * spec.out.l;
    Scalar* lse = static_cast<Scalar*>(call.lse);
    if (lse) lse += (run.batch * spec.Hq + p.head) * spec.Lq + t;
    ExactRow<V, S> row{task, p, t, exact, 0, 0};
    write(out, s.total == 0 ? 0 : static_cast<Scalar>(spec.keep_scale) / s.total);
    if (lse) *lse = lse_of(row, s.shift, s.total, s.only_sink);
    if (is_finite(s) || row.query_is_nan()) return;
    row.run([&](int64_t j, const S* q, bool kept) {
      int64_t ld;
      const double score = row.score(q, keys.rows(run_key(j), 1, converted, scales, ld), 1, j);
      row.add(score, values.rows(run_key(j), 1, converted, scales, ld), 1, kept);
    });
    row.write(out, 0, lse);
  }

  bool finish() {
    Task task{};
    task.spec = &spec;
    task.call = &call;
    task.batch = run.batch;
    task.kv_head = run.kv_head;
    task.row_step = 1;
    task.key = run.key;
    task.key_step = run.key_step;
    for (int64_t r = 0; r < all_rows; ++r) finish_row(r, task);
    return !keys.has_bad_page() && !values.has_bad_page();
  }
};

template <class V, class S>
constexpr DecodeKernels decode_kernels() {
  using D = Decode<V, S>;
  return {D::partial_bytes, D::max_splits, D::scratch_bytes, [](const Run& run) { return D(run).compute(); },
          [](const Run& run) { return D(run).finish(); }};
}

}  // namespace

const DecodeKernels REGARD_TABLE(decode)[4] = REGARD_EACH_DTYPE(decode_kernels);
