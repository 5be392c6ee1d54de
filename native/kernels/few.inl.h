// Products of a few rows with many keys, with channels in the lanes. Rows are [row][width]. Scores and
// weights are [key][P], as in scores.inl.h.
#pragma once
#include "kernels/few.h"
#include "kernels/gemm.inl.h"
#include "kernels/pack.inl.h"

namespace {

// Rows that share each loaded vector of a key.
template <class V>
constexpr int kRowBlock = V::N < 4 ? V::N : 4;

// Calls work(RowCount<R>, first row) for blocks that cover rows [r, rows).
template <class V, class Work>
inline void visit_row_blocks(int64_t r, int64_t rows, Work work) {
  for (; r + kRowBlock<V> <= rows; r += kRowBlock<V>) work(RowCount<kRowBlock<V>>{}, r);
  for (; r + 2 <= rows; r += 2) work(RowCount<2>{}, r);
  for (; r < rows; ++r) work(RowCount<1>{}, r);
}

// Returns the dot products of R rows with C = V::N / R keys: lane r * C + c is row r and key c. Adds
// in the order of decode.cpp, so that backward recomputes the scores of a decode step exactly.
// Prefetches `ahead` elements beyond each load, because the hardware prefetcher does not follow C rows.
template <class V, int R>
REGARD_INLINE V dots_of_rows(const Number<V>* rows, int64_t width, const Number<V>* const (&keys)[V::N / R],
                             int64_t ahead) {
  constexpr int C = V::N / R;
  V sum[V::N];
  UNROLLED (i, V::N) sum[i] = Lanes<V>::zero();
  int64_t d = 0;
  for (; d + V::N <= width; d += V::N) {
    V row[R];
    UNROLLED (r, R) row[r] = Lanes<V>::load(rows + r * width + d);
    UNROLLED (c, C) {
      if (d * sizeof(Number<V>) % 64 == 0) __builtin_prefetch(keys[c] + d + ahead);
      const V key = Lanes<V>::load(keys[c] + d);
      UNROLLED (r, R) sum[r * C + c] = fma(row[r], key, sum[r * C + c]);
    }
  }
  const V sums = lane_sums(sum);
  if (d == width) return sums;
  Number<V> tail[V::N];
  for (int i = 0; i < V::N; ++i) {
    tail[i] = 0;
    for (int64_t t = d; t < width; ++t) tail[i] += rows[i / C * width + t] * keys[i % C][t];
  }
  return sums + Lanes<V>::load(tail);
}

// The dot products of R rows with keys c, c + 1, ... of n.
template <class V, int R>
REGARD_INLINE V dots_of_rows(const Number<V>* rows, int64_t width, const Number<V>* keys, int64_t ld,
                             int64_t c, int64_t n) {
  constexpr int C = V::N / R;
  const Number<V>* key[C];
  UNROLLED (i, C) key[i] = keys + (c + i < n ? c + i : n - 1) * ld;
  return dots_of_rows<V, R>(rows, width, key, C * ld);
}

// Stores lane r * C + i of `x` as element [c + i][r] of products[n][P].
template <class V, int R>
REGARD_INLINE void store_products(V x, int64_t c, int64_t n, Number<V>* products) {
  constexpr int C = V::N / R;
  Number<V> lane[V::N];
  Lanes<V>::store(lane, x);
  UNROLLED (i, C)
    if (c + i < n) {
      UNROLLED (r, R) products[(c + i) * kPanel<V> + r] = lane[r * C + i];
    }
}

// Returns the vector whose lane r * V::N / R + c is x[r].
template <class V, int R>
REGARD_INLINE V repeat_rows(const Number<V>* x) {
  Number<V> lane[V::N];
  UNROLLED (i, V::N) lane[i] = x[i / (V::N / R)];
  return Lanes<V>::load(lane);
}

// products[n][P] = keys[n][width] * rows[count][width]. Lanes beyond the rows are set to 0.
template <class V>
void multiply_few(const Number<V>* rows, int count, int64_t width, const Number<V>* keys, int64_t ld,
                  int64_t n, Number<V>* products) {
  for (int64_t i = 0; i < n * kPanel<V>; i += V::N) Lanes<V>::store(products + i, Lanes<V>::zero());
  visit_row_blocks<V>(0, count, [&](auto block, int64_t first) {
    constexpr int R = block.value;
    for (int64_t c = 0; c < n; c += V::N / R)
      store_products<V, R>(dots_of_rows<V, R>(rows + first * width, width, keys, ld, c, n), c, n,
                           products + first);
  });
}

// C[n][0:P] += A[n][lane] * B[lane][0:P], summed over the first `lanes` lanes of a panel.
template <class V>
void add_few_lanes(int64_t n, const Number<V>* a, int64_t lanes, const Number<V>* b, Number<V>* c,
                   int64_t ldc) {
  visit_tiles(n, [&](auto count, int64_t first) {
    V sum[count.value][2];
    multiply<V, count.value, true>(a + first * kPanel<V>, kPanel<V>, b, lanes, sum);
    UNROLLED (r, count.value)
      UNROLLED (i, 2) {
        Number<V>* target = c + (first + r) * ldc + i * V::N;
        Lanes<V>::store(target, Lanes<V>::load(target) + sum[r][i]);
      }
  });
}

// sum[R][d : d + Vectors * V::N] += weights[n][P] * keys[n]
template <class V, int R, int Vectors>
REGARD_INLINE void add_key_columns(const Number<V>* weights, const Number<V>* keys, int64_t ld, int64_t n,
                                   int64_t width, Number<V>* sum) {
  V partial[R][Vectors];
  UNROLLED (i, R * Vectors) partial[i / Vectors][i % Vectors] = Lanes<V>::zero();
  for (int64_t c = 0; c < n; ++c)
    UNROLLED (i, Vectors) {
      const V key = Lanes<V>::load(keys + c * ld + i * V::N);
      UNROLLED (r, R) partial[r][i] = fma(Lanes<V>::set(weights[c * kPanel<V> + r]), key, partial[r][i]);
    }
  UNROLLED (r, R)
    UNROLLED (i, Vectors) {
      Number<V>* target = sum + r * width + i * V::N;
      Lanes<V>::store(target, Lanes<V>::load(target) + partial[r][i]);
    }
}

// sum[count][width] += weights[n][P]^T * keys[n][width]
template <class V>
void add_keys_to_few(const Number<V>* weights, int count, const Number<V>* keys, int64_t ld, int64_t n,
                     int64_t width, Number<V>* sum) {
  visit_row_blocks<V>(0, count, [&](auto block, int64_t r) {
    constexpr int R = block.value, Vectors = R > 2 ? 2 : 4;
    Number<V>* rows = sum + r * width;
    int64_t d = 0;
    for (; d + Vectors * V::N <= width; d += Vectors * V::N)
      add_key_columns<V, R, Vectors>(weights + r, keys + d, ld, n, width, rows + d);
    for (; d + V::N <= width; d += V::N)
      add_key_columns<V, R, 1>(weights + r, keys + d, ld, n, width, rows + d);
    for (int64_t c = 0; c < n && d < width; ++c)
      for (int t = 0; t < R; ++t)
        for (int64_t e = d; e < width; ++e)
          rows[t * width + e] += weights[c * kPanel<V> + r + t] * keys[c * ld + e];
  });
}

}  // namespace
