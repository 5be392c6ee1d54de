// Panels with few query rows: lanes run along D instead, so that no lane is idle. Scores keep the panel
// layout [key][P]; queries and output are rows here, [row][D] and [row][Dv].
#pragma once
#include "math.inl.h"
#include "pack.inl.h"

namespace {

// Up to this many rows are better off here.
template <class V>
constexpr int kFew = V::N / 2;

// Dot products of one query with V::N keys.
template <class V>
inline V dots(const typename V::Scalar* q, const typename V::Scalar* keys, int64_t ld, int64_t D) {
  V sum[V::N];
#pragma GCC unroll 16
  for (int j = 0; j < V::N; ++j) sum[j] = Lanes<V>::zero();
  int64_t d = 0;
  for (; d + V::N <= D; d += V::N) {
    const V x = Lanes<V>::load(q + d);
#pragma GCC unroll 16
    for (int j = 0; j < V::N; ++j) sum[j] = fma(x, Lanes<V>::load(keys + j * ld + d), sum[j]);
  }
  transpose(sum);
#pragma GCC unroll 16
  for (int j = 1; j < V::N; ++j) sum[0] = sum[0] + sum[j];
  if (d == D) return sum[0];
  typename V::Scalar rest[V::N];
  for (int j = 0; j < V::N; ++j) {
    rest[j] = 0;
    for (int64_t t = d; t < D; ++t) rest[j] += q[t] * keys[j * ld + t];
  }
  return sum[0] + Lanes<V>::load(rest);
}

template <class V>
inline typename V::Scalar dot(const typename V::Scalar* q, const typename V::Scalar* key, int64_t D) {
  V sum = Lanes<V>::zero();
  int64_t d = 0;
  for (; d + V::N <= D; d += V::N) sum = fma(Lanes<V>::load(q + d), Lanes<V>::load(key + d), sum);
  typename V::Scalar total = sum_of(sum);
  for (; d < D; ++d) total += q[d] * key[d];
  return total;
}

// scores[n][P], of which the first V::N lanes are filled. Whole vectors are stored: what reads them back
// would wait for single lanes.
template <class V>
void score_keys_few(const typename V::Scalar* keys, int64_t ld, int64_t n, const typename V::Scalar* queries,
                    int64_t D, int rows, typename V::Scalar* scores) {
  int64_t c = 0;
  for (; c + V::N <= n; c += V::N) {
    V block[V::N];
    for (int r = 0; r < V::N; ++r)
      block[r] = r < rows ? dots<V>(queries + r * D, keys + c * ld, ld, D) : Lanes<V>::zero();
    transpose(block);
    for (int j = 0; j < V::N; ++j) Lanes<V>::store(scores + (c + j) * kPanel<V>, block[j]);
  }
  for (; c < n; ++c) {
    typename V::Scalar lane[V::N] = {};
    for (int r = 0; r < rows; ++r) lane[r] = dot<V>(queries + r * D, keys + c * ld, D);
    Lanes<V>::store(scores + c * kPanel<V>, Lanes<V>::load(lane));
  }
}

// Scores of a single row, keys in the lanes, filled up with -inf to whole vectors. Returns the largest.
template <class V>
typename V::Scalar score_row(const typename V::Scalar* keys, int64_t ld, int64_t n,
                             const typename V::Scalar* q, int64_t D, typename V::Scalar* scores) {
  int64_t c = 0;
  for (; c + V::N <= n; c += V::N) Lanes<V>::store(scores + c, dots<V>(q, keys + c * ld, ld, D));
  for (; c % V::N || c < n; ++c)
    scores[c] = c < n ? dot<V>(q, keys + c * ld, D) : static_cast<typename V::Scalar>(-__builtin_inf());
  V top = Lanes<V>::load(scores);
  for (int64_t i = V::N; i < c; i += V::N) top = max(Lanes<V>::load(scores + i), top);
  typename V::Scalar lane[V::N];
  Lanes<V>::store(lane, top);
  for (int i = 1; i < V::N; ++i) lane[0] = lane[i] > lane[0] || lane[0] != lane[0] ? lane[i] : lane[0];
  return lane[0];
}

// scores -> 2^(scores - shift) for a single row. Returns their sum.
template <class V>
typename V::Scalar exponentiate_row(typename V::Scalar* scores, int64_t n, V shift) {
  V sum = Lanes<V>::zero();
  for (int64_t i = 0; i < n; i += V::N) {
    const V weight = exp2(Lanes<V>::load(scores + i) - shift);
    Lanes<V>::store(scores + i, weight);
    sum = sum + weight;
  }
  return sum_of(sum);
}

// A row of `Count` vectors of the output, over all keys of the block, whose weights lie `Step` apart.
template <class V, int Count, int Step>
inline void add_value_columns(const typename V::Scalar* values, int64_t ld, int64_t n,
                              const typename V::Scalar* weights, typename V::Scalar* out) {
  V sum[Count];
#pragma GCC unroll 8
  for (int i = 0; i < Count; ++i) sum[i] = Lanes<V>::zero();
  for (int64_t c = 0; c < n; ++c) {
    const V w = Lanes<V>::set(weights[c * Step]);
#pragma GCC unroll 8
    for (int i = 0; i < Count; ++i) sum[i] = fma(w, Lanes<V>::load(values + c * ld + i * V::N), sum[i]);
  }
  for (int i = 0; i < Count; ++i) Lanes<V>::store(out + i * V::N, Lanes<V>::load(out + i * V::N) + sum[i]);
}

// out[Dv] += weights[n] * values[n][Dv], for one row
template <class V, int Step>
void add_values_row(const typename V::Scalar* values, int64_t ld, int64_t n,
                    const typename V::Scalar* weights, int64_t Dv, typename V::Scalar* out) {
  int64_t d = 0;
  for (; d + 8 * V::N <= Dv; d += 8 * V::N)
    add_value_columns<V, 8, Step>(values + d, ld, n, weights, out + d);
  for (; d + V::N <= Dv; d += V::N) add_value_columns<V, 1, Step>(values + d, ld, n, weights, out + d);
  for (; d < Dv; ++d) {
    typename V::Scalar sum = 0;
    for (int64_t c = 0; c < n; ++c) sum += weights[c * Step] * values[c * ld + d];
    out[d] += sum;
  }
}

// out[rows][Dv] += weights[n][P]^T * values[n][Dv]
template <class V>
void add_values_few(const typename V::Scalar* values, int64_t ld, int64_t n,
                    const typename V::Scalar* weights, int64_t Dv, int rows, typename V::Scalar* out) {
  for (int r = 0; r < rows; ++r) add_values_row<V, kPanel<V>>(values, ld, n, weights + r, Dv, out + r * Dv);
}

}  // namespace
