// The matrix multiplication micro-kernel and the products that attention needs. A tile of R <= 6
// rows (8 for pairs) by one panel of P = 2 * V::N lanes stays in registers: C[r][0:P] = sum over k of
// A(r, k) * B[k][0:P]. Loop order: chains of at most kDepth elements, tiles of rows, k. Each chain's
// sum is added to C in memory, which bounds the rounding error. O is the operand: the vector type of
// A and B (see isa.h). Depths are in elements of A: with pairs, two numbers each.
#pragma once
#include "kernels/isa.h"

#define REGARD_ALWAYS __attribute__((always_inline))
#define REGARD_INLINE REGARD_ALWAYS inline

namespace {

// Rows of a register tile: enough for the latency of the products.
template <class O>
constexpr int kTileRows = O::kTerms == 1 ? 6 : 8;

// Elements summed in one chain. Products of pairs are rounded once for two terms, and their inputs
// are so coarse that longer chains do not show.
template <class O>
constexpr int64_t kDepth = O::kTerms == 1 ? kChain : 128;

// Returns the rows of the next tile. Remainders of up to 2 rows beyond a full tile are split evenly,
// which avoids tiles of 1 or 2 rows.
template <int Most>
inline int tile_rows(int64_t left) {
  if (left > Most && left < Most + 3) return static_cast<int>(left + 1) / 2;
  return left < Most ? static_cast<int>(left) : Most;
}

// sum += A * B for R rows. A(r, k) is a[r * lda + k] if RowMajor, else a[r + k * lda].
template <class O, int R, bool RowMajor>
REGARD_INLINE void multiply_add(const Number<O>* a, int64_t lda, const Number<O>* b, int64_t depth,
                                Sum<O> (&sum)[R][2]) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    const O b0 = Lanes<O>::load(b + k * 2 * O::N), b1 = Lanes<O>::load(b + k * 2 * O::N + O::N);
    UNROLLED (r, R) {
      const O x = Lanes<O>::set(RowMajor ? a[r * lda + k] : a[r + k * lda]);
      sum[r][0] = fma(x, b0, sum[r][0]);
      sum[r][1] = fma(x, b1, sum[r][1]);
    }
  }
}

template <class O, int R, bool RowMajor>
REGARD_INLINE void multiply(const Number<O>* a, int64_t lda, const Number<O>* b, int64_t depth,
                            Sum<O> (&sum)[R][2]) {
  UNROLLED (r, R) sum[r][0] = sum[r][1] = Lanes<Sum<O>>::zero();
  multiply_add<O, R, RowMajor>(a, lda, b, depth, sum);
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

// Calls call(RowCount<rows>) for 1 <= rows <= Most.
template <int Most, class Call>
REGARD_INLINE void with_rows(int64_t rows, Call call) {
  if constexpr (Most > 1)
    if (rows < Most) return with_rows<Most - 1>(rows, call);
  call(RowCount<Most>{});
}

// Calls tile(RowCount<R>, first row) for tiles that cover n rows.
template <int Most = kTileRows<Floats>, class Tile>
REGARD_INLINE void visit_tiles(int64_t n, Tile tile) {
  for (int64_t first = 0, rows; first < n; first += rows) {
    rows = tile_rows<Most>(n - first);
    with_rows<Most>(rows, [&](auto count) REGARD_ALWAYS { tile(count, first); });
  }
}

// C += A * B for R rows.
template <class O, int R, bool RowMajor>
REGARD_INLINE void add_tile(const Number<O>* a, int64_t lda, const Number<O>* b, int64_t depth,
                            Number<Sum<O>>* c) {
  Sum<O> sum[R][2];
  multiply<O, R, RowMajor>(a, lda, b, depth, sum);
  add_rows(c, sum);
  store_rows(c, sum);
}

// Calls finish(row, sum) with the products rows[n][depth] * panel[depth][P], one tile at a time, while
// they are in registers: sum[R][2] are the vectors of rows [row, row + R). The sums of all chains
// but the last wait in buffer[n][P].
template <class O, class Finish>
void multiply_rows(const Number<O>* rows, int64_t ld, int64_t n, const Number<O>* panel, int64_t depth,
                   Number<Sum<O>>* buffer, Finish finish) {
  constexpr int P = 2 * O::N;
  int64_t k = 0;
  do {
    const int64_t chain = depth - k < kDepth<O> ? depth - k : kDepth<O>;
    visit_tiles<kTileRows<O>>(n, [&](auto count, int64_t row) {
      Sum<O> sum[count.value][2];
      multiply<O, count.value, true>(rows + row * ld + k, ld, panel + k * P, chain, sum);
      if (k > 0) add_rows(buffer + row * P, sum);
      if (k + chain < depth)
        store_rows(buffer + row * P, sum);
      else
        finish(row, sum);
    });
    k += chain;
  } while (k < depth);
}

// Sums over keys end at multiples of so many elements.
template <class O>
constexpr int64_t kKeyDepth = kDepth<O> < 96 ? kDepth<O> : 96;

// out[Dv][P] += values[n][Dv]^T * weights[n][P]. The first element is element `begin` of the task's
// keys.
template <class O>
void add_values(const Number<O>* values, int64_t ld, int64_t begin, int64_t n, const Number<O>* weights,
                int64_t Dv, Number<Sum<O>>* out) {
  for (int64_t k = 0, depth; k < n; k += depth) {
    depth = kKeyDepth<O> - (begin + k) % kKeyDepth<O>;
    depth = depth < n - k ? depth : n - k;
    visit_tiles<kTileRows<O>>(Dv, [&](auto rows, int64_t d) {
      add_tile<O, rows.value, false>(values + k * ld + d, ld, weights + k * 2 * O::N, depth,
                                     out + d * 2 * O::N);
    });
  }
}

// C[r][0:P] += A[panel][r][lane] * B[panel][lane][0:P], summed over all lanes of the panels in the
// bit set `panels`.
template <class O, int R>
REGARD_INLINE void add_lanes(const Number<O>* a, int64_t panel_stride, uint32_t panels, const Number<O>* b,
                             Number<Sum<O>>* c, int64_t ldc) {
  constexpr int P = 2 * O::N, depth = P / O::kTerms;
  Sum<O> sum[R][2];
  UNROLLED (r, R) sum[r][0] = sum[r][1] = Lanes<Sum<O>>::zero();
  for (; panels; panels >>= 1, a += panel_stride, b += depth * P)
    if (panels & 1) multiply_add<O, R, true>(a, depth, b, depth, sum);
  UNROLLED (r, R)
    UNROLLED (i, 2) {
      Number<Sum<O>>* target = c + r * ldc + i * O::N;
      Lanes<Sum<O>>::store(target, Lanes<Sum<O>>::load(target) + sum[r][i]);
    }
}

// Calls add_lanes<O, R> with R = rows, which must be at most kTileRows<O>.
template <class O>
void add_lanes(int64_t rows, const Number<O>* a, int64_t panel_stride, uint32_t panels, const Number<O>* b,
               Number<Sum<O>>* c, int64_t ldc) {
  with_rows<kTileRows<O>>(
      rows, [&](auto count) REGARD_ALWAYS { add_lanes<O, count.value>(a, panel_stride, panels, b, c, ldc); });
}

}  // namespace
