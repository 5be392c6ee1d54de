// The matrix multiplication micro-kernel and the products that attention needs. A tile of R <= 6
// rows by one panel of P = 2 * V::N lanes stays in registers: C[r][0:P] = sum over k of A(r, k) *
// B[k][0:P]. Loop order: chains of at most kChain terms, tiles of rows, k. Each chain's sum is
// added to C in memory, which bounds the rounding error.
#pragma once
#include "kernels/isa.h"

#define REGARD_ALWAYS __attribute__((always_inline))
#define REGARD_INLINE REGARD_ALWAYS inline

namespace {

// Returns the rows of the next tile. Remainders of 7 and 8 rows are split into 4 + 3 and 4 + 4,
// which avoids tiles of 1 or 2 rows.
inline int tile_rows(int64_t left) {
  if (left == 7 || left == 8) return 4;
  return left < 6 ? static_cast<int>(left) : 6;
}

// sum += A * B for R rows. A(r, k) is a[r * lda + k] if RowMajor, else a[r + k * lda].
template <class V, int R, bool RowMajor>
REGARD_INLINE void multiply_add(const Number<V>* a, int64_t lda, const Number<V>* b, int64_t depth,
                                V (&sum)[R][2]) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    const V b0 = Lanes<V>::load(b + k * 2 * V::N), b1 = Lanes<V>::load(b + k * 2 * V::N + V::N);
    UNROLLED (r, R) {
      const V x = Lanes<V>::set(RowMajor ? a[r * lda + k] : a[r + k * lda]);
      sum[r][0] = fma(x, b0, sum[r][0]);
      sum[r][1] = fma(x, b1, sum[r][1]);
    }
  }
}

template <class V, int R, bool RowMajor>
REGARD_INLINE void multiply(const Number<V>* a, int64_t lda, const Number<V>* b, int64_t depth,
                            V (&sum)[R][2]) {
  UNROLLED (r, R) sum[r][0] = sum[r][1] = Lanes<V>::zero();
  multiply_add<V, R, RowMajor>(a, lda, b, depth, sum);
}

// Calls visit(row, half, vector) for the vectors of a tile.
template <class V, int R, class Visit>
REGARD_INLINE void each_vector(V (&tile)[R][2], Visit visit) {
  UNROLLED (r, R)
    UNROLLED (i, 2) visit(r, i, tile[r][i]);
}

// tile += rows[R][P], and rows[R][P] = tile.
template <class V, int R>
REGARD_INLINE void add_rows(const Number<V>* rows, V (&tile)[R][2]) {
  each_vector(tile, [&](int r, int i, V& x) { x = x + Lanes<V>::load(rows + (2 * r + i) * V::N); });
}
template <class V, int R>
REGARD_INLINE void store_rows(Number<V>* rows, V (&tile)[R][2]) {
  each_vector(tile, [&](int r, int i, V x) { Lanes<V>::store(rows + (2 * r + i) * V::N, x); });
}

template <int R>
struct RowCount {
  static constexpr int value = R;
};

// Calls tile(RowCount<R>, first row) for tiles that cover n rows.
template <class Tile>
REGARD_INLINE void visit_tiles(int64_t n, Tile tile) {
  for (int64_t first = 0, rows; first < n; first += rows) {
    rows = tile_rows(n - first);
    if (rows == 6)
      tile(RowCount<6>{}, first);
    else if (rows == 4)
      tile(RowCount<4>{}, first);
    else if (rows == 5)
      tile(RowCount<5>{}, first);
    else if (rows == 3)
      tile(RowCount<3>{}, first);
    else if (rows == 2)
      tile(RowCount<2>{}, first);
    else
      tile(RowCount<1>{}, first);
  }
}

// C += A * B for R rows.
template <class V, int R, bool RowMajor>
REGARD_INLINE void add_tile(const Number<V>* a, int64_t lda, const Number<V>* b, int64_t depth,
                            Number<V>* c) {
  V sum[R][2];
  multiply<V, R, RowMajor>(a, lda, b, depth, sum);
  add_rows(c, sum);
  store_rows(c, sum);
}

// Calls finish(row, sum) with the products rows[n][depth] * panel[depth][P], one tile at a time, while
// they are in registers: sum[R][2] are the vectors of rows [row, row + R). The sums of all chains
// but the last wait in buffer[n][P].
template <class V, class Finish>
void multiply_rows(const Number<V>* rows, int64_t ld, int64_t n, const Number<V>* panel, int64_t depth,
                   Number<V>* buffer, Finish finish) {
  constexpr int P = 2 * V::N;
  int64_t k = 0;
  do {
    const int64_t chain = depth - k < kChain ? depth - k : kChain;
    visit_tiles(n, [&](auto count, int64_t row) {
      V sum[count.value][2];
      multiply<V, count.value, true>(rows + row * ld + k, ld, panel + k * P, chain, sum);
      if (k > 0) add_rows(buffer + row * P, sum);
      if (k + chain < depth)
        store_rows(buffer + row * P, sum);
      else
        finish(row, sum);
    });
    k += chain;
  } while (k < depth);
}

// out[Dv][P] += values[n][Dv]^T * weights[n][P]
template <class V>
void add_values(const Number<V>* values, int64_t ld, int64_t n, const Number<V>* weights, int64_t Dv,
                Number<V>* out) {
  constexpr int64_t chain = kChain < 96 ? kChain : 96;
  for (int64_t k = 0; k < n; k += chain)
    visit_tiles(Dv, [&](auto rows, int64_t d) {
      const int64_t depth = n - k < chain ? n - k : chain;
      add_tile<V, rows.value, false>(values + k * ld + d, ld, weights + k * 2 * V::N, depth,
                                     out + d * 2 * V::N);
    });
}

// C[r][0:P] += A[panel][r][lane] * B[panel][lane][0:P], summed over all lanes of the panels in the
// bit set `panels`.
template <class V, int R>
REGARD_INLINE void add_lanes(const Number<V>* a, int64_t panel_stride, uint32_t panels, const Number<V>* b,
                             Number<V>* c, int64_t ldc) {
  constexpr int P = 2 * V::N;
  V sum[R][2];
  UNROLLED (r, R) sum[r][0] = sum[r][1] = Lanes<V>::zero();
  for (; panels; panels >>= 1, a += panel_stride, b += P * P) {
    if (!(panels & 1)) continue;
#pragma GCC unroll 4
    for (int k = 0; k < P; ++k) {
      const V b0 = Lanes<V>::load(b + k * P), b1 = Lanes<V>::load(b + k * P + V::N);
      UNROLLED (r, R) {
        const V x = Lanes<V>::set(a[r * P + k]);
        sum[r][0] = fma(x, b0, sum[r][0]);
        sum[r][1] = fma(x, b1, sum[r][1]);
      }
    }
  }
  UNROLLED (r, R)
    UNROLLED (i, 2) {
      Number<V>* target = c + r * ldc + i * V::N;
      Lanes<V>::store(target, Lanes<V>::load(target) + sum[r][i]);
    }
}

// Calls add_lanes<V, R> with R = rows. `rows` must be at most kLanesRows.
constexpr int kLanesRows = 6;
template <class V>
void add_lanes(int64_t rows, const Number<V>* a, int64_t panel_stride, uint32_t panels, const Number<V>* b,
               Number<V>* c, int64_t ldc) {
  switch (rows) {
    case 6: return add_lanes<V, 6>(a, panel_stride, panels, b, c, ldc);
    case 5: return add_lanes<V, 5>(a, panel_stride, panels, b, c, ldc);
    case 4: return add_lanes<V, 4>(a, panel_stride, panels, b, c, ldc);
    case 3: return add_lanes<V, 3>(a, panel_stride, panels, b, c, ldc);
    case 2: return add_lanes<V, 2>(a, panel_stride, panels, b, c, ldc);
    default: return add_lanes<V, 1>(a, panel_stride, panels, b, c, ldc);
  }
}

}  // namespace
