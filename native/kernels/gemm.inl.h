// The one micro-kernel: a tile of R rows by one panel, C[r][0:P] = sum over k of A(r, k) * B[k][0:P].
#pragma once

namespace {

// Tiles of 6 rows, and remainders that leave no tile of 1 or 2 rows where it can be helped.
inline int tile_rows(int64_t left) {
  if (left == 7 || left == 8) return 4;
  return left < 6 ? static_cast<int>(left) : 6;
}

// A(r, k) = a[r * lda + k] when RowMajor, else a[r + k * lda].
template <class V, int R, bool RowMajor>
inline void multiply(const typename V::Scalar* a, int64_t lda, const typename V::Scalar* b, int64_t depth,
                     V (&sum)[R][2]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = Lanes<V>::zero();
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    const V b0 = Lanes<V>::load(b + k * 2 * V::N), b1 = Lanes<V>::load(b + k * 2 * V::N + V::N);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const V x = Lanes<V>::set(RowMajor ? a[r * lda + k] : a[r + k * lda]);
      sum[r][0] = fma(x, b0, sum[r][0]);
      sum[r][1] = fma(x, b1, sum[r][1]);
    }
  }
}

// Scores of R keys, and the largest of each lane.
template <class V, int R>
inline void score_tile(const typename V::Scalar* keys, int64_t ld, const typename V::Scalar* queries, int64_t D,
                       typename V::Scalar* scores, V (&top)[2]) {
  V sum[R][2];
  multiply<V, R, true>(keys, ld, queries, D, sum);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Lanes<V>::store(scores + (2 * r + i) * V::N, sum[r][i]);
      top[i] = max(sum[r][i], top[i]);
    }
}

// Adds R columns of the values, weighted, to the output panel.
template <class V, int R>
inline void value_tile(const typename V::Scalar* values, int64_t ld, const typename V::Scalar* weights, int64_t n,
                       typename V::Scalar* out) {
  V sum[R][2];
  multiply<V, R, false>(values, ld, weights, n, sum);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      typename V::Scalar* at = out + (2 * r + i) * V::N;
      Lanes<V>::store(at, Lanes<V>::load(at) + sum[r][i]);
    }
}

// scores[n][P] = keys[n][D] * queries[D][P]
template <class V>
void score_keys(const typename V::Scalar* keys, int64_t ld, int64_t n, const typename V::Scalar* queries, int64_t D,
                typename V::Scalar* scores, V (&top)[2]) {
  for (int64_t done = 0; done < n;) {
    const int rows = tile_rows(n - done);
    const typename V::Scalar* k = keys + done * ld;
    typename V::Scalar* s = scores + done * 2 * V::N;
    switch (rows) {
      case 6: score_tile<V, 6>(k, ld, queries, D, s, top); break;
      case 5: score_tile<V, 5>(k, ld, queries, D, s, top); break;
      case 4: score_tile<V, 4>(k, ld, queries, D, s, top); break;
      case 3: score_tile<V, 3>(k, ld, queries, D, s, top); break;
      case 2: score_tile<V, 2>(k, ld, queries, D, s, top); break;
      default: score_tile<V, 1>(k, ld, queries, D, s, top);
    }
    done += rows;
  }
}

// out[Dv][P] += values[n][Dv]^T * weights[n][P]
template <class V>
void add_values(const typename V::Scalar* values, int64_t ld, int64_t n, const typename V::Scalar* weights, int64_t Dv,
                typename V::Scalar* out) {
  for (int64_t done = 0; done < Dv;) {
    const int rows = tile_rows(Dv - done);
    const typename V::Scalar* v = values + done;
    typename V::Scalar* o = out + done * 2 * V::N;
    switch (rows) {
      case 6: value_tile<V, 6>(v, ld, weights, n, o); break;
      case 5: value_tile<V, 5>(v, ld, weights, n, o); break;
      case 4: value_tile<V, 4>(v, ld, weights, n, o); break;
      case 3: value_tile<V, 3>(v, ld, weights, n, o); break;
      case 2: value_tile<V, 2>(v, ld, weights, n, o); break;
      default: value_tile<V, 1>(v, ld, weights, n, o);
    }
    done += rows;
  }
}

}  // namespace
