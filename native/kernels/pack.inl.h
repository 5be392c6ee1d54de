// Packs the caller's rows into panels, panel[column][row] with query rows in the lanes, and slices,
// slices[column / P][row][P] with columns in the lanes, and unpacks results. Full vectors are
// transposed in registers in squares of V::N; remainders are moved element by element. Numbers that
// are multiplied in pairs are packed to words: of two columns, or of two rows (interleaved).
#pragma once
#include "kernels/isa.h"

namespace {

template <class V>
constexpr int kPanel = 2 * V::N;

// Functors that combine a panel's element with a source element. Scaled replaces the element.
template <class V>
struct Scaled {
  using Scalar = Number<V>;
  Scalar factor;
  V operator()(V, V x) const { return x * Lanes<V>::set(factor); }
  Scalar operator()(Scalar, Scalar x) const { return x * factor; }
};

// Biased adds a bias to a score. A bias of -inf masks the key. A finite bias leaves the score
// finite, however large the bias is.
template <class V>
struct Biased {
  using Scalar = Number<V>;
  Scalar factor;
  static constexpr Scalar kInfinity = static_cast<Scalar>(__builtin_inf());
  static constexpr Scalar kLowest =
      sizeof(Scalar) == 4 ? static_cast<Scalar>(-__FLT_MAX__) : static_cast<Scalar>(-__DBL_MAX__);
  V operator()(V score, V x) const {
    const V finite = max(Lanes<V>::set(kLowest), fma_once(x, Lanes<V>::set(factor), score));
    return select(differs(x, Lanes<V>::set(-kInfinity)), finite, x);
  }
  Scalar operator()(Scalar score, Scalar x) const {
    if (x == -kInfinity) return x;
    const Scalar sum = fma_once(x, factor, score);
    return sum > kLowest || sum != sum ? sum : kLowest;
  }
};

template <class V, class S, class Put>
inline void pack_scalar(const S* source, int64_t row_stride, int64_t col_stride, int row, int row_end,
                        int64_t col, int64_t cols, Put put, Number<V>* panel) {
  for (int64_t c = col; c < cols; ++c)
    for (int r = row; r < row_end; ++r) {
      Number<V>& element = panel[c * kPanel<V> + r];
      element = put(element, static_cast<Number<V>>(to_float(source[r * row_stride + c * col_stride])));
    }
}

// panel[c][r] = put(panel[c][r], source[r][c]) for the first `rows` rows. Other lanes keep their
// values.
template <class V, class S, class Put>
void pack(const S* source, int64_t row_stride, int64_t col_stride, int rows, int64_t cols, Put put,
          Number<V>* panel) {
  for (int r = 0; r < rows; r += V::N) {
    int64_t c = 0;
    if (col_stride == 1 && r + V::N <= rows)
      for (; c + V::N <= cols; c += V::N) {
        V block[V::N];
        UNROLLED (i, V::N) block[i] = Lanes<V>::load(source + (r + i) * row_stride + c);
        transpose(block);
        UNROLLED (i, V::N) {
          Number<V>* target = panel + (c + i) * kPanel<V> + r;
          Lanes<V>::store(target, put(Lanes<V>::load(target), block[i]));
        }
      }
    pack_scalar<V>(source, row_stride, col_stride, r, r + V::N < rows ? r + V::N : rows, c, cols, put, panel);
  }
}

// panel[c][r] = put(panel[c][r], source[c]) for every row.
template <class V, class S, class Put>
void pack_broadcast(const S* source, int64_t col_stride, int64_t cols, Put put, Number<V>* panel) {
  for (int64_t c = 0; c < cols; ++c) {
    const V x = Lanes<V>::set(static_cast<Number<V>>(to_float(source[c * col_stride])));
    for (int r = 0; r < kPanel<V>; r += V::N) {
      Number<V>* target = panel + c * kPanel<V> + r;
      Lanes<V>::store(target, put(Lanes<V>::load(target), x));
    }
  }
}

// Functors that store a result: rounded to the target's dtype, or its residual, the rounding error
// of a 16-bit output.
template <class V>
struct StoreAsIs {
  template <class S>
  void operator()(S* target, V x) const {
    Lanes<V>::store(target, x);
  }
  template <class S>
  void operator()(S* target, Number<V> x) const {
    from_float(target, x);
  }
};
template <class V, class S>
struct RoundingResidual {
  int64_t rounded;  // offset of the rounded output from the residual, in elements
  void operator()(S* target, V x) const { Lanes<V>::store(target, x - Lanes<V>::load(target + rounded)); }
  void operator()(S* target, Number<V> x) const { from_float(target, x - to_float(target[rounded])); }
};

// target[r][c] = panel[c][r] * factor[r] for the first `rows` rows.
template <class V, class S, class Put>
void unpack(const Number<V>* panel, int64_t cols, const Number<V>* factor, int rows, S* target,
            int64_t row_stride, int64_t col_stride, Put put) {
  for (int r = 0; r < rows; r += V::N) {
    const V scale = Lanes<V>::load(factor + r);
    const int filled = rows - r < V::N ? rows - r : V::N;
    int64_t c = 0;
    for (; col_stride == 1 && c + V::N <= cols; c += V::N) {
      V block[V::N];
      UNROLLED (i, V::N) block[i] = Lanes<V>::load(panel + (c + i) * kPanel<V> + r) * scale;
      transpose(block);
      UNROLLED (i, V::N)
        if (i < filled) put(target + (r + i) * row_stride + c, block[i]);
    }
    for (; c < cols; ++c)
      for (int i = 0; i < filled; ++i)
        put(target + (r + i) * row_stride + c * col_stride, panel[c * kPanel<V> + r + i] * factor[r + i]);
  }
}

// target[r][c] += panel[c][r] * factor for the first `rows` rows.
template <class V>
void unpack_add(const Number<V>* panel, int64_t cols, Number<V> factor, int rows, Number<V>* target,
                int64_t row_stride, int64_t col_stride) {
  const V scale = Lanes<V>::set(factor);
  for (int r = 0; r < rows; r += V::N) {
    const int filled = rows - r < V::N ? rows - r : V::N;
    int64_t c = 0;
    for (; col_stride == 1 && c + V::N <= cols; c += V::N) {
      V block[V::N];
      UNROLLED (i, V::N) block[i] = Lanes<V>::load(panel + (c + i) * kPanel<V> + r);
      transpose(block);
      UNROLLED (i, V::N)
        if (Number<V>* sum = target + (r + i) * row_stride + c; i < filled)
          Lanes<V>::store(sum, fma(block[i], scale, Lanes<V>::load(sum)));
    }
    for (; c < cols; ++c)
      for (int i = 0; i < filled; ++i)
        target[(r + i) * row_stride + c * col_stride] += panel[c * kPanel<V> + r + i] * factor;
  }
}

// slices[c / P][r][c % P] = source[r][c] * factor[r]; the last slice is padded with zeros. `ld` is
// the number of rows in a slice.
template <class V, class S>
void pack_slices(const S* source, int64_t row_stride, int64_t col_stride, int rows, int64_t cols,
                 const Number<V>* factor, int64_t ld, Number<V>* slices) {
  constexpr int P = kPanel<V>;
  for (int r = 0; r < rows; ++r) {
    const V scale = Lanes<V>::set(factor[r]);
    const S* from = source + r * row_stride;
    Number<V>* to = slices + r * P;
    int64_t c = 0;
    for (; col_stride == 1 && c + P <= cols; c += P, to += ld * P) {
      Lanes<V>::store(to, Lanes<V>::load(from + c) * scale);
      Lanes<V>::store(to + V::N, Lanes<V>::load(from + c + V::N) * scale);
    }
    for (; c < cols; c += P, to += ld * P)
      for (int i = 0; i < P; ++i) to[i] = c + i < cols ? to_float(from[(c + i) * col_stride]) * factor[r] : 0;
  }
}

// target[r][c] = slices[c / P][r][c % P] * factor. `ld` is the number of rows in a slice.
template <class V, class S>
void unpack_slices(const Number<V>* slices, int64_t ld, int64_t rows, int64_t cols, Number<V> factor,
                   S* target, int64_t row_stride, int64_t col_stride) {
  constexpr int P = kPanel<V>;
  const V scale = Lanes<V>::set(factor);
  for (int64_t r = 0; r < rows; ++r) {
    const Number<V>* from = slices + r * P;
    S* to = target + r * row_stride;
    int64_t c = 0;
    for (; col_stride == 1 && c + P <= cols; c += P, from += ld * P) {
      Lanes<V>::store(to + c, Lanes<V>::load(from) * scale);
      Lanes<V>::store(to + c + V::N, Lanes<V>::load(from + V::N) * scale);
    }
    for (; c < cols; c += P, from += ld * P)
      for (int i = 0; i < P && c + i < cols; ++i) from_float(to + (c + i) * col_stride, from[i] * factor);
  }
}

// Copies rows and converts them to the compute type. Target rows are `ld` elements apart.
template <class V, class S>
void copy_rows(const S* source, int64_t row_stride, int64_t col_stride, int64_t rows, int64_t cols,
               int64_t ld, Number<V>* target) {
  for (int64_t r = 0; r < rows; ++r, source += row_stride, target += ld) {
    int64_t c = 0;
    if (col_stride == 1)
      for (; c + V::N <= cols; c += V::N) Lanes<V>::store(target + c, Lanes<V>::load(source + c));
    for (; c < cols; ++c) target[c] = to_float(source[c * col_stride]);
  }
}

#ifdef REGARD_PAIRS
inline uint32_t word(BHalf even, BHalf odd) { return even.bits | static_cast<uint32_t>(odd.bits) << 16; }

// Returns the word of columns c and c + 1, which is 0 if the row has no column c + 1.
inline uint32_t word_of_columns(const BHalf* row, int64_t stride, int64_t c, int64_t cols) {
  return word(row[c * stride], c + 1 < cols ? row[(c + 1) * stride] : BHalf{0});
}

// panel[c][r] = columns 2 * c and 2 * c + 1 of source row r, for the first `rows` rows.
inline void pack_words(const BHalf* source, int64_t row_stride, int64_t col_stride, int rows, int64_t cols,
                       uint32_t* panel) {
  constexpr int N = Pairs::N, P = 2 * N;
  for (int r = 0; r < rows; r += N) {
    int64_t c = 0;
    for (; col_stride == 1 && r + N <= rows && c + 2 * N <= cols; c += 2 * N) {
      Pairs block[N];
      UNROLLED (i, N) block[i] = Lanes<Pairs>::load(source + (r + i) * row_stride + c);
      transpose(block);
      UNROLLED (i, N) Lanes<Pairs>::store(panel + (c / 2 + i) * P + r, block[i]);
    }
    for (; c < cols; c += 2)
      for (int i = r; i < r + N && i < rows; ++i)
        panel[c / 2 * P + i] = word_of_columns(source + i * row_stride, col_stride, c, cols);
  }
}

// target[r][c] = columns 2 * c and 2 * c + 1 of source row r. Target rows are `ld` words apart.
inline void copy_words(const BHalf* source, int64_t row_stride, int64_t col_stride, int64_t rows,
                       int64_t cols, int64_t ld, uint32_t* target) {
  constexpr int N = Pairs::N;
  for (int64_t r = 0; r < rows; ++r, source += row_stride, target += ld) {
    int64_t c = 0;
    for (; col_stride == 1 && c + 2 * N <= cols; c += 2 * N)
      Lanes<Pairs>::store(target + c / 2, Lanes<Pairs>::load(source + c));
    for (; c < cols; c += 2) target[c / 2] = word_of_columns(source, col_stride, c, cols);
  }
}

// target[r][c] = column c of source rows 2 * r and 2 * r + 1. A row after the last is zero. Target rows
// are `ld` words apart.
inline void interleave_rows(const BHalf* source, int64_t row_stride, int64_t col_stride, int64_t rows,
                            int64_t cols, int64_t ld, uint32_t* target) {
  constexpr int N = Pairs::N;
  for (int64_t r = 0; r < rows; r += 2, source += 2 * row_stride, target += ld) {
    const bool both = r + 1 < rows;
    int64_t c = 0;
    for (; both && col_stride == 1 && c + N <= cols; c += N)
      Lanes<Pairs>::store(target + c, interleave(source + c, source + row_stride + c));
    for (; c < cols; ++c)
      target[c] = word(source[c * col_stride], both ? source[row_stride + c * col_stride] : BHalf{0});
  }
}

// Clears the non-finite numbers of interleaved rows[ceil(n / 2)][cols], and tells which rows had some.
inline void clear_non_finite(uint32_t* rows, int64_t n, int64_t cols, bool* non_finite) {
  for (int64_t r = 0; r < n; ++r) {
    const uint32_t exponent = r & 1 ? 0x7F800000 : 0x7F80, half = r & 1 ? 0xFFFF0000 : 0xFFFF;
    non_finite[r] = false;
    for (int64_t c = 0; c < cols; ++c)
      if (uint32_t& x = rows[r / 2 * cols + c]; (x & exponent) == exponent) {
        x &= ~half;
        non_finite[r] = true;
      }
  }
}
#endif

// Pack rows as operands of O. Queries are multiplied by `factor`, except pairs, which would be rounded
// again. The elements of the transposed copy hold neighbouring rows, others neighbouring columns.
template <class O, class S>
void pack_operand(const S* source, int64_t row_stride, int64_t col_stride, int rows, int64_t cols,
                  Number<Sum<O>> factor, Number<O>* panel) {
  if constexpr (O::kTerms == 1)
    pack<O>(source, row_stride, col_stride, rows, cols, Scaled<O>{factor}, panel);
  else
    pack_words(source, row_stride, col_stride, rows, cols, panel);
}
template <class O, class S>
void copy_operand(const S* source, int64_t row_stride, int64_t col_stride, int64_t rows, int64_t cols,
                  int64_t ld, Number<O>* target) {
  if constexpr (O::kTerms == 1)
    copy_rows<O>(source, row_stride, col_stride, rows, cols, ld, target);
  else
    copy_words(source, row_stride, col_stride, rows, cols, ld, target);
}
template <class O, class S>
void copy_transposed_operand(const S* source, int64_t row_stride, int64_t col_stride, int64_t rows,
                             int64_t cols, int64_t ld, Number<O>* target) {
  if constexpr (O::kTerms == 1)
    copy_rows<O>(source, row_stride, col_stride, rows, cols, ld, target);
  else
    interleave_rows(source, row_stride, col_stride, rows, cols, ld, target);
}

}  // namespace
