// Decode: few query rows attend to many stored keys. `run` computes the partial result of one split
// of at most 512 keys for all query rows of its group; `finish` merges the splits' partial results.
// Loop order: sets of 64 rows; for each set all scores, then the softmax of each row, then all
// values; each of these passes reads tiles of 32 keys. Blocks of up to 4 rows share the loaded
// keys, with lanes along D. If there are enough rows to fill panels, the lanes are rows, and tiles
// have 96 keys.
#include "kernels/exact.inl.h"
#include "kernels/few.inl.h"
#include "kernels/rows.inl.h"
#include "kernels/stored.inl.h"

namespace {

// Software prefetch distances in rows. The hardware prefetcher does not follow several row streams.
// Keys and values of at most kCachedBytes are likely to be in L2 and are not prefetched.
constexpr int64_t kPrefetchKeys = 8, kPrefetchValues = kTileKeys, kCachedBytes = 512 << 10;

// Returns the dot products of R queries with C = V::N / R keys: lane r * C + c is query r and key
// c. If `ahead` is not 0, prefetches `ahead` elements beyond each load.
template <class V, int R, class K>
REGARD_INLINE V dots(const Number<V>* queries, int64_t ldq, const FloatRow<V, K> (&keys)[V::N / R], int64_t D,
                     int64_t ahead) {
  constexpr int C = V::N / R, kLine = FloatRow<V, K>::kLine;
  V sum[V::N];
  UNROLLED (i, V::N) sum[i] = Lanes<V>::zero();
  const auto step = [&](int64_t d, int i) REGARD_ALWAYS {
    V q[R];
    UNROLLED (r, R) q[r] = Lanes<V>::load(queries + r * ldq + d + i);
    UNROLLED (c, C) {
      const V k = keys[c].load(d, i);
      UNROLLED (r, R) sum[r * C + c] = fma(q[r], k, sum[r * C + c]);
    }
  };
  int64_t d = 0;
  for (; d + kLine <= D; d += kLine) {
    if (ahead) {
      UNROLLED (c, C) keys[c].prefetch(d, ahead);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kLine; i += V::N) step(d, i);
  }
  for (; d + V::N <= D; d += V::N) step(d, 0);
  const V sums = lane_sums(sum);
  if (d == D) return sums;
  Number<V> tail[V::N];
  for (int i = 0; i < V::N; ++i) {
    tail[i] = 0;
    for (int64_t t = d; t < D; ++t) tail[i] += queries[i / C * ldq + t] * keys[i % C].element(t);
  }
  return sums + Lanes<V>::load(tail);
}

// Quantised keys. With one query, scale after summing a group; with several, dequantise once and
// share.
template <class V, int R, StoreKind Kind>
REGARD_INLINE V dots(const Number<V>* queries, int64_t ldq, const CodeRow<V, Kind> (&keys)[V::N / R],
                     int64_t D, int64_t ahead) {
  using Row = CodeRow<V, Kind>;
  constexpr int C = V::N / R;
  V sum[V::N];
  UNROLLED (i, V::N) sum[i] = Lanes<V>::zero();
  for (int64_t g = 0; g * kGroup < D; ++g) {
    const Number<V>* q = queries + g * kGroup;
    if (ahead) {
      UNROLLED (c, C) keys[c].prefetch(g, ahead);
    }
    if constexpr (R == 1) {
      V query_sum = Lanes<V>::load(q);
#pragma GCC unroll 8
      for (int i = V::N; i < kGroup; i += V::N) query_sum = query_sum + Lanes<V>::load(q + i);
      UNROLLED (c, C) {
        V products = Lanes<V>::zero();
        UNROLLED (u, Row::kUnits) {
          V x[Row::kVectors];
          keys[c].load(g, u, x);
          UNROLLED (n, Row::kVectors) products = fma(Lanes<V>::load(q + Row::channel(u, n)), x[n], products);
        }
        sum[c] = fma(products, keys[c].scale(g), sum[c]);
        if constexpr (Kind == kInt4) sum[c] = fma(query_sum, keys[c].low(g), sum[c]);
      }
    } else {
      UNROLLED (u, Row::kUnits) {
        V x[C][Row::kVectors];
        UNROLLED (c, C) {
          keys[c].load(g, u, x[c]);
          UNROLLED (n, Row::kVectors) x[c][n] = keys[c].dequantise(x[c][n], g);
        }
        UNROLLED (t, R * Row::kVectors) {
          const int r = t / Row::kVectors, n = t % Row::kVectors;
          const V query = Lanes<V>::load(q + r * ldq + Row::channel(u, n));
          UNROLLED (c, C) sum[r * C + c] = fma(query, x[c][n], sum[r * C + c]);
        }
      }
    }
  }
  return lane_sums(sum);
}

// Computes scores[R][ld_scores] of R queries and a tile of n keys.
template <class V, int R, class Tile>
void score_tile(const Number<V>* queries, int64_t ldq, int64_t D, const Tile& keys, int64_t n, int64_t ahead,
                Number<V>* scores, int64_t ld_scores) {
  constexpr int C = V::N / R;
  for (int64_t c = 0; c < n; c += C) {
    typename Tile::Row key[C];
    for (int i = 0; i < C; ++i) key[i] = keys.row(c + i < n ? c + i : n - 1);
    const V dot_products = dots<V, R>(queries, ldq, key, D, ahead * keys.ld);
    const int64_t left = n - c;
    if (R == 1 && left >= C) {
      Lanes<V>::store(scores + c, dot_products);
      continue;
    }
    Number<V> lane[V::N];
    Lanes<V>::store(lane, dot_products);
    UNROLLED (r, R)
      UNROLLED (i, C)
        if (i < left) scores[r * ld_scores + c + i] = lane[r * C + i];
  }
}

template <class V>
REGARD_INLINE void add_to(Number<V>* at, V x) {
  Lanes<V>::store(at, Lanes<V>::load(at) + x);
}

// out[R][d : d + Vectors * V::N] += weights[R][n] * values[n]
template <class V, int R, int Vectors, class K>
REGARD_INLINE void add_columns(const Number<V>* weights, int64_t ld_weights, const FloatTile<V, K>& values,
                               int64_t d, int64_t n, int64_t ahead, Number<V>* out, int64_t ldo) {
  V sum[R][Vectors];
  UNROLLED (r, R)
    UNROLLED (i, Vectors) sum[r][i] = Lanes<V>::zero();
  for (int64_t c = 0; c < n; ++c) {
    const FloatRow<V, K> row = values.row(c);
    V w[R];
    UNROLLED (r, R) w[r] = Lanes<V>::set(weights[r * ld_weights + c]);
    UNROLLED (i, Vectors) {
      if (ahead && i * V::N % row.kLine == 0) row.prefetch(d + i * V::N, ahead * values.ld);
      const V v = row.load(d, i * V::N);
      UNROLLED (r, R) sum[r][i] = fma(w[r], v, sum[r][i]);
    }
  }
  UNROLLED (r, R)
    UNROLLED (i, Vectors) add_to(out + r * ldo + d + i * V::N, sum[r][i]);
}

// The same for quantised values, for `Units` units (of CodeRow) from unit `first` on. With one row,
// scale the weight; with several rows, dequantise once and share.
template <class V, int R, int Units, StoreKind Kind>
REGARD_INLINE void add_columns(const Number<V>* weights, int64_t ld_weights, const CodeTile<V, Kind>& values,
                               int64_t first, int64_t n, int64_t ahead, Number<V>* out, int64_t ldo) {
  using Row = CodeRow<V, Kind>;
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
      if (R == 1 && u % Row::kUnits == 0) {
        factor = w[0] * row.scale(group);
        if constexpr (Kind == kInt4) low_sums[u] = fma(w[0], row.low(group), low_sums[u]);
      }
      if (ahead && unit == 0) row.prefetch(group, ahead * values.ld);
      V x[Row::kVectors];
      row.load(group, unit, x);
      UNROLLED (i, Row::kVectors) {
        const V v = R == 1 ? x[i] : row.dequantise(x[i], group);
        UNROLLED (r, R) sum[r][u][i] = fma(R == 1 ? factor : w[r], v, sum[r][u][i]);
      }
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
              int64_t ahead, Number<V>* out, int64_t ldo, int64_t Dv) {
  constexpr int Vectors = 8 / R;
  int64_t d = 0;
  for (; d + Vectors * V::N <= Dv; d += Vectors * V::N)
    add_columns<V, R, Vectors>(weights, ld_weights, values, d, n, ahead, out, ldo);
  for (; d + V::N <= Dv; d += V::N) add_columns<V, R, 1>(weights, ld_weights, values, d, n, ahead, out, ldo);
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
              int64_t ahead, Number<V>* out, int64_t ldo, int64_t Dv) {
  using Row = CodeRow<V, Kind>;
  constexpr int kUnits = Row::kUnits, kMax = 8 / R / Row::kVectors;  // sums stay in registers
  constexpr int Units = R == 1 ? (kMax < kUnits ? kUnits : kMax / kUnits * kUnits) : kMax > 0 ? kMax : 1;
  const int64_t units = round_up(Dv, kGroup) / kGroup * kUnits;
  int64_t u = 0;
  for (; u + Units <= units; u += Units)
    add_columns<V, R, Units>(weights, ld_weights, values, u, n, ahead, out, ldo);
  constexpr int kTail = R == 1 ? kUnits : 1;
  for (; u < units; u += kTail) add_columns<V, R, kTail>(weights, ld_weights, values, u, n, ahead, out, ldo);
}

// Keys in a tile if rows are in panels. With AVX2, the sum over a whole tile stays in registers.
constexpr int64_t kPanelKeys = 96;

// Rows that are processed together. Their scores and the split's keys and values stay in L2.
constexpr int64_t kRowSet = 64;

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

  const Split& split;
  const Spec& spec;
  const Call& call;
  int64_t ldq, ldo;            // row strides of queries and outputs, rounded up to whole groups
  int64_t group, all_rows;     // row r is query r % Lq of head r / Lq of the group
  int64_t first = 0, rows;     // the current set is rows [first, first + rows)
  int64_t rows_in_panels = 0;  // the first rows of the set, up to this many, are in panels
  Stored<V, S> keys, values;
  Arena arena;
  Scalar *queries, *scores, *converted, *scales, *sum;
  // [panel][D][P], [panel][Dv][P], scores or weights [key][P]
  Scalar *query_panels, *out_panels, *panel_scores;
  double* exact;

  explicit Decode(const Split& p)
      : split(p), spec(*p.spec), call(*p.call), ldq(round_up(spec.D, kGroup)), ldo(round_up(spec.Dv, kGroup)),
        group(spec.Hq / spec.Hkv), all_rows(group * spec.Lq), rows(max_rows(spec)),
        rows_in_panels(in_panels(rows)), keys(Stored<V, S>::keys(p)), values(Stored<V, S>::values(p)),
        arena{static_cast<char*>(p.scratch)} {
    const int64_t width = spec.D > spec.Dv ? spec.D : spec.Dv;
    queries = arena.take<Scalar>(rows * ldq);
    scores = arena.take<Scalar>(rows * kSplitKeys);
    converted = arena.take<Scalar>(Stored<V, S>::tile_size(width, tile_keys(rows)));
    scales = arena.take<Scalar>(Stored<V, S>::scales_size(width, tile_keys(rows)));
    sum = arena.take<Scalar>(spec.Dv);
    exact = arena.take<double>(spec.Dv);
    query_panels = arena.take<Scalar>(panels() * P * spec.D);
    out_panels = arena.take<Scalar>(panels() * P * spec.Dv);
    panel_scores = arena.take<Scalar>(rows_in_panels ? P * kPanelKeys : 0);
  }

  static int64_t max_rows(const Spec& s) {
    const int64_t rows = s.Hq / s.Hkv * s.Lq;
    return rows < kRowSet ? rows : kRowSet;
  }
  // Backward multiplies few rows without panels, and must get the same weights.
  int64_t in_panels(int64_t n) const { return call.stats ? 0 : rows_for_panels<V>(n); }
  int64_t panels() const { return (rows_in_panels + P - 1) / P; }
  static int64_t tile_keys(int64_t rows) { return rows_for_panels<V>(rows) ? kPanelKeys : kTileKeys; }

  static int64_t scratch_bytes(const Spec& s) {
    const int64_t rows = max_rows(s), width = s.D > s.Dv ? s.D : s.Dv;
    const int64_t n = tile_keys(rows), lanes = round_up(rows_for_panels<V>(rows), P);
    const int64_t scalars = rows * (round_up(s.D, kGroup) + kSplitKeys) + Stored<V, S>::tile_size(width, n) +
                            Stored<V, S>::scales_size(width, n) + 3 * s.Dv + lanes * (s.D + s.Dv) +
                            (lanes ? P * kPanelKeys : 0);
    return scalars * sizeof(Scalar) + 9 * 64;
  }

  static int64_t partial_bytes(const Spec& s) {
    const int64_t rows = s.Hq / s.Hkv * s.Lq;
    return round_up(rows * (round_up(s.Dv, kGroup) + 2) * sizeof(Scalar), 64);
  }

  Partial partial(int64_t index) const {
    Scalar* data = reinterpret_cast<Scalar*>(static_cast<char*>(split.partial) + index * partial_bytes(spec));
    return {data, data + all_rows, data + 2 * all_rows};
  }

  int64_t head(int64_t r) const { return split.kv_head * group + r / spec.Lq; }
  int lane(int64_t r) const { return static_cast<int>(r % spec.Lq); }
  const SpanList& spans(int64_t r) const { return split.spans[split.by_head ? r / spec.Lq : 0]; }

  // Converts key j of the call to the split's numbering.
  int64_t split_key(int64_t j) const { return (j - split.key) / split.key_step; }

  RowCoords coords(int64_t r, int64_t begin) const {
    const int64_t offset = call.offsets ? call.offsets[split.batch] : call.offset;
    return {split.batch,   head(r), lane(r), offset + lane(r), split.key + begin * split.key_step,
            split.key_step};
  }

  const S* query(int64_t r) const {
    return static_cast<const S*>(call.q) + split.batch * spec.q.b + head(r) * spec.q.h + lane(r) * spec.q.l;
  }

  // One split

  bool fits_in_l2() const {
    return spec.B * spec.Hkv * spec.Lk * (spec.D + spec.Dv) * static_cast<int64_t>(sizeof(S)) <= kCachedBytes;
  }

  void start_queries() {
    const double scale = spec.softcap > 0 ? 2 * kLog2E * spec.scale / spec.softcap : kLog2E * spec.scale;
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

  // Calls work(first key, keys, tile) for all keys of the split that some row may attend to.
  template <class Work>
  void visit_key_tiles(Stored<V, S>& stored, Work work) {
    for (int64_t i = 0; i < split.n_any_row; ++i) {
      const int64_t begin = split.any_row[i].begin > split.begin ? split.any_row[i].begin : split.begin;
      const int64_t end = split.any_row[i].end < split.end ? split.any_row[i].end : split.end;
      for (int64_t j = begin, n; j < end; j += n) {
        n = end - j < tile_keys(rows) ? end - j : tile_keys(rows);
        visit_key_tile(stored, j, n, work);
      }
    }
  }

  // Reads the tile in place if one block of query rows is its only user. Otherwise converts it once
  // for all blocks.
  template <class Work>
  void visit_key_tile(Stored<V, S>& stored, int64_t j, int64_t n, Work work) {
    const int64_t c = j - split.begin;
    int64_t ld = 0;
    if constexpr (sizeof(Scalar) == sizeof(float)) {
      if (spec.store == kInt8 && rows <= kRowBlock<V>)
        if (const auto codes = stored.template codes_in_place<kInt8>(j, n, scales); codes.codes)
          return work(c, n, codes);
      if (spec.store == kInt4 && rows <= kRowBlock<V>)
        if (const auto codes = stored.template codes_in_place<kInt4>(j, n, scales); codes.codes)
          return work(c, n, codes);
    }
    if (sizeof(S) == sizeof(Scalar) || rows <= kRowBlock<V>)
      if (const S* data = stored.in_place(j, n, ld)) return work(c, n, FloatTile<V, S>{data, ld});
    const Scalar* data = stored.rows(j, n, converted, scales, ld);
    work(c, n, FloatTile<V, Scalar>{data, ld});
  }

  void score() {
    visit_key_tiles(keys, [&](int64_t c, int64_t n, const auto& k) {
      score_panels(k, c, n);
      visit_row_blocks<V>(rows_in_panels, rows, [&](auto count, int64_t r) {
        score_tile<V, count.value>(queries + r * ldq, ldq, spec.D, k, n, fits_in_l2() ? 0 : kPrefetchKeys,
                                   scores + r * kSplitKeys + c, kSplitKeys);
      });
    });
  }

  void score_panels(const FloatTile<V, Scalar>& k, int64_t c, int64_t n) {
    Scalar ones[P];
    for (Scalar& one : ones) one = 1;
    visit_panels([&](int64_t i, int count) {
      V unused[2] = {Lanes<V>::zero(), Lanes<V>::zero()};
      score_keys<V>(k.data, k.ld, n, query_panels + i * P * spec.D, spec.D, panel_scores, unused);
      unpack<V>(panel_scores, n, ones, count, scores + i * P * kSplitKeys + c, kSplitKeys, 1, StoreAsIs<V>());
    });
  }

  void add_panels(const FloatTile<V, Scalar>& v, int64_t c, int64_t n) {
    visit_panels([&](int64_t i, int count) {
      pack<V>(scores + i * P * kSplitKeys + c, kSplitKeys, 1, count, n, Scaled<V>{1}, panel_scores);
      ::add_values<V>(v.data, v.ld, n, panel_scores, spec.Dv, out_panels + i * P * spec.Dv);
    });
  }

  // Overloads for tiles that are read in place in another type. They do nothing: `visit_key_tile`
  // yields such tiles only if no rows are in panels.
  template <class Tile>
  void score_panels(const Tile&, int64_t, int64_t) {}
  template <class Tile>
  void add_panels(const Tile&, int64_t, int64_t) {}

  // Turns a row of raw scores into weights: softcap, bias, mask, softmax, dropout.
  void softmax_row(int64_t r, const Partial& p) {
    Scalar* row = scores + r * kSplitKeys;
    const int64_t n = split.end - split.begin, filled = round_up(n, V::N);
    const RowCoords at = coords(first + r, split.begin);
    if (spec.softcap > 0) soft_cap<V>(row, filled, static_cast<Scalar>(spec.softcap * kLog2E));
    if (spec.bias != kNoBias) add_bias<V, S>(spec, call, at, n, row);
    mask_row<V>(spans(first + r), lane(first + r), split.begin, split.end, row);
    const V shift = ceil(Lanes<V>::set(max_of_row<V>(row, filled)));
    p.shift[r] = first_lane(shift);
    p.total[r] = exponentiate_row<V>(row, filled, finite_shift(shift));
    if (spec.drop_below)
      drop_row<V>(dropout_stream(spec, call, split.batch, at.head, at.row), call.origin.key + at.key,
                  at.key_step, spec.drop_below, n, row);
  }

  void add_values(const Partial& p) {
    for (int64_t i = rows_in_panels * ldo; i < rows * ldo; ++i) p.out[i] = 0;
    for (int64_t i = 0; i < panels() * P * spec.Dv; ++i) out_panels[i] = 0;
    visit_key_tiles(values, [&](int64_t c, int64_t n, const auto& v) {
      add_panels(v, c, n);
      visit_row_blocks<V>(rows_in_panels, rows, [&](auto count, int64_t r) {
        add_tile<V, count.value>(scores + r * kSplitKeys + c, kSplitKeys, v, n,
                                 fits_in_l2() ? 0 : kPrefetchValues, p.out + r * ldo, ldo, spec.Dv);
      });
    });
    Scalar ones[P];
    for (Scalar& one : ones) one = 1;
    visit_panels([&](int64_t i, int count) {
      unpack<V>(out_panels + i * P * spec.Dv, spec.Dv, ones, count, p.out + i * P * ldo, ldo, 1,
                StoreAsIs<V>());
    });
  }

  bool run() {
    for (first = 0; first < all_rows; first += rows) {
      if (all_rows - first < rows) rows = all_rows - first, rows_in_panels = in_panels(rows);
      const Partial all = partial(0), p{all.shift + first, all.total + first, all.out + first * ldo};
      start_queries();
      score();
      for (int64_t r = 0; r < rows; ++r) softmax_row(r, p);
      add_values(p);
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
    for (int64_t i = 0; i < split.n_partials; ++i)
      if (const Scalar shift = partial(i).shift[r]; shift > max_shift) max_shift = shift;
    const Scalar shift = first_lane(finite_shift(Lanes<V>::set(max_shift)));
    Scalar total = first_lane(first_total * exp2(first_shift - Lanes<V>::set(shift)));
    bool only_sink = call.sink;
    for (int64_t d = 0; d < spec.Dv; ++d) sum[d] = 0;
    for (int64_t i = 0; i < split.n_partials; ++i) {
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

  template <class Put>
  void write(S* out, Scalar factor, Put put) const {
    int64_t d = 0;
    for (; spec.out.d == 1 && d + V::N <= spec.Dv; d += V::N)
      put(out + d, Lanes<V>::load(sum + d) * Lanes<V>::set(factor));
    for (; d < spec.Dv; ++d) put(out + d * spec.out.d, sum[d] * factor);
  }

  void write_stats(const Panel& p, int t, Scalar shift, Scalar total) const {
    Scalar* stats = static_cast<Scalar*>(call.stats) + (split.batch * spec.Hq + p.head) * spec.Lq + t;
    stats[0] = shift;
    stats[spec.B * spec.Hq * spec.Lq] = total;
  }

  // Writes the stats and the residual of a row, for backward.
  void write_saved(const Panel& p, int t, const MergedSoftmax& s, Scalar factor, const S* out) const {
    const bool masked = s.only_sink && !attends_to_any(p, t);
    write_stats(p, t, s.shift, masked ? 0 : s.total);
    if (!call.residual) return;
    S* residual = static_cast<S*>(call.residual) + (out - static_cast<S*>(call.out));
    write(residual, factor, RoundingResidual<V, S>{out - residual});
  }

  void finish_row(int64_t r, const Task& task) {
    const Panel p{head(r), 0, static_cast<int>(spec.Lq), spans(r).spans, spans(r).count};
    const int t = lane(r);
    const MergedSoftmax s = merge(r);
    S* out = static_cast<S*>(call.out) + split.batch * spec.out.b + p.head * spec.out.h + t * spec.out.l;
    Scalar* lse = static_cast<Scalar*>(call.lse);
    if (lse) lse += (split.batch * spec.Hq + p.head) * spec.Lq + t;
    ExactRow<V, S> row{task, p, t, exact, 0, 0};
    const Scalar factor = s.total == 0 ? 0 : static_cast<Scalar>(spec.keep_scale) / s.total;
    write(out, factor, StoreAsIs<V>());
    if (call.stats) write_saved(p, t, s, factor, out);
    if (lse) *lse = lse_of(row, s.shift, s.total, s.only_sink);
    if (is_finite(s) || row.query_is_nan()) return;
    row.run([&](int64_t j, const S* q, bool kept) {
      int64_t ld;
      const double score = row.score(q, keys.rows(split_key(j), 1, converted, scales, ld), 1, j);
      row.add(score, values.rows(split_key(j), 1, converted, scales, ld), 1, kept);
    });
    row.write(out, 0, lse);
    if (call.stats) write_stats(p, t, row.shift(), row.sum_at_shift());
  }

  bool finish() {
    Task task{};
    task.spec = &spec;
    task.call = &call;
    task.batch = split.batch;
    task.kv_head = split.kv_head;
    task.row_step = 1;
    task.key = split.key;
    task.key_step = split.key_step;
    for (int64_t r = 0; r < all_rows; ++r) finish_row(r, task);
    return !keys.has_bad_page() && !values.has_bad_page();
  }
};

template <class V, class S>
constexpr DecodeKernels decode_kernels() {
  using D = Decode<V, S>;
  return {D::partial_bytes, D::scratch_bytes, [](const Split& p) { return D(p).run(); },
          [](const Split& p) { return D(p).finish(); }};
}

}  // namespace

const DecodeKernels REGARD_TABLE(decode)[4] = REGARD_EACH_DTYPE(decode_kernels);
