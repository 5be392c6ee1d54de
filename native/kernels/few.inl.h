// Panels with few query rows: lanes run along D instead, so that no lane is idle. Scores keep the panel
// layout [key][P]; queries and output are rows here, [row][D] and [row][Dv].
#pragma once
#include "pack.inl.h"

namespace {

// Up to this many rows are better off here.
template <class V>
constexpr int kFew = V::N / 2;

template <class V>
inline typename V::Scalar sum_of(V x) {
  typename V::Scalar lane[V::N], sum = 0;
  Lanes<V>::store(lane, x);
  for (int i = 0; i < V::N; ++i) sum += lane[i];
  return sum;
}

// Dot products of one query with V::N keys.
template <class V>
inline V dots(const typename V::Scalar* q, const typename V::Scalar* keys, int64_t ld, int64_t D) {
  V sum[V::N];
  for (int j = 0; j < V::N; ++j) sum[j] = Lanes<V>::zero();
  int64_t d = 0;
  for (; d + V::N <= D; d += V::N) {
    const V x = Lanes<V>::load(q + d);
    for (int j = 0; j < V::N; ++j) sum[j] = fma(x, Lanes<V>::load(keys + j * ld + d), sum[j]);
  }
  transpose(sum);
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

// scores[n][P], of which `rows` lanes are filled
template <class V>
void score_keys_few(const typename V::Scalar* keys, int64_t ld, int64_t n, const typename V::Scalar* queries,
                    int64_t D, int rows, typename V::Scalar* scores) {
  for (int r = 0; r < rows; ++r) {
    const typename V::Scalar* q = queries + r * D;
    int64_t c = 0;
    for (; c + V::N <= n; c += V::N) {
      typename V::Scalar eight[V::N];
      Lanes<V>::store(eight, dots<V>(q, keys + c * ld, ld, D));
      for (int j = 0; j < V::N; ++j) scores[(c + j) * kPanel<V> + r] = eight[j];
    }
    for (; c < n; ++c) scores[c * kPanel<V> + r] = dot<V>(q, keys + c * ld, D);
  }
}

// A row of `Count` vectors of the output, over all keys of the block.
template <class V, int Count>
inline void add_values_row(const typename V::Scalar* values, int64_t ld, int64_t n,
                           const typename V::Scalar* weights, typename V::Scalar* out) {
  V sum[Count];
  for (int i = 0; i < Count; ++i) sum[i] = Lanes<V>::zero();
  for (int64_t c = 0; c < n; ++c) {
    const V w = Lanes<V>::set(weights[c * kPanel<V>]);
    for (int i = 0; i < Count; ++i) sum[i] = fma(w, Lanes<V>::load(values + c * ld + i * V::N), sum[i]);
  }
  for (int i = 0; i < Count; ++i) Lanes<V>::store(out + i * V::N, Lanes<V>::load(out + i * V::N) + sum[i]);
}

// out[rows][Dv] += weights[n][P]^T * values[n][Dv]
template <class V>
void add_values_few(const typename V::Scalar* values, int64_t ld, int64_t n,
                    const typename V::Scalar* weights, int64_t Dv, int rows, typename V::Scalar* out) {
  for (int r = 0; r < rows; ++r) {
    typename V::Scalar* o = out + r * Dv;
    int64_t d = 0;
    for (; d + 8 * V::N <= Dv; d += 8 * V::N) add_values_row<V, 8>(values + d, ld, n, weights + r, o + d);
    for (; d + V::N <= Dv; d += V::N) add_values_row<V, 1>(values + d, ld, n, weights + r, o + d);
    for (; d < Dv; ++d) {
      typename V::Scalar sum = 0;
      for (int64_t c = 0; c < n; ++c) sum += weights[c * kPanel<V> + r] * values[c * ld + d];
      o[d] += sum;
    }
  }
}

}  // namespace
