// out = x W^T + bias for few rows of x, at the speed of reading W. The lanes are columns of W and x.
// Each pair of a row of W and a row of x has one accumulator, whose lanes are added at the end.
#include "kernels/halves.inl.h"

namespace {

template <class V>
constexpr int64_t kStep = 2 * V::N;  // columns multiplied at once
template <class V>
constexpr int kBlock = V::N > 8 ? V::N : 8;  // rows of W multiplied before lanes are added
// The accumulators of a tile, a few rows of W times a few rows of x, fit into the registers: 32 if
// vectors have 64 bytes, otherwise 16.
constexpr int kRowsAlone = 8, kRows = 4;  // rows of W, with one row of x and with several
template <class V>
constexpr int kMostX = sizeof(V) == 64 ? 4 : 3;

template <class V>
int64_t padded_depth(const Projection& p) {
  return (p.depth + kStep<V> - 1) / kStep<V> * kStep<V>;
}

template <class V>
int64_t packed_bytes(const Projection& p) {
  return p.rows * padded_depth<V>(p) * static_cast<int64_t>(sizeof(Number<V>));
}

// Copies the first `count` elements of a row and appends zeros.
template <class V, class S>
inline void copy_end(const S* row, int64_t stride, int64_t count, S (&end)[kStep<V>]) {
  for (int64_t i = 0; i < kStep<V>; ++i) end[i] = i < count ? row[i * stride] : S{};
}

// Converts x to the compute type, in the order of `load_half`, and pads its rows with zeros.
template <class V, class S>
void pack_rows(const Projection& p, void* target) {
  Number<V>* packed = static_cast<Number<V>*>(target);
  for (int64_t r = 0; r < p.rows; ++r) {
    const S* row = static_cast<const S*>(p.x) + r * p.x_row;
    for (int64_t c = 0; c < p.depth; c += kStep<V>, packed += kStep<V>) {
      S end[kStep<V>];
      const bool in_place = p.x_column == 1 && c + kStep<V> <= p.depth;
      if (!in_place) copy_end<V>(row + c * p.x_column, p.x_column, p.depth - c, end);
      const S* step = in_place ? row + c : end;
      Lanes<V>::store(packed, load_half<V, 0>(step));
      Lanes<V>::store(packed + V::N, load_half<V, 1>(step));
    }
  }
}

template <class V, int Half, class S, int P, int Q>
inline void add_half(const S* const (&w)[P], int64_t at, const Number<V>* x, int64_t x_row, V (&sum)[Q][P]) {
  V factor[Q];
  UNROLLED (q, Q) factor[q] = Lanes<V>::load(x + q * x_row + Half * V::N);
  UNROLLED (i, P) {
    const V weight = load_half<V, Half>(w[i] + at);
    UNROLLED (q, Q) sum[q][i] = fma(weight, factor[q], sum[q][i]);
  }
}

template <class V, class S, int P, int Q>
inline void add_step(const S* const (&w)[P], int64_t at, const Number<V>* x, int64_t x_row, V (&sum)[Q][P]) {
  add_half<V, 0>(w, at, x, x_row, sum);
  add_half<V, 1>(w, at, x, x_row, sum);
}

// Multiplies P rows of W by Q rows of x. The sums of row q of x are sums[q * kBlock]. Their order
// depends on the depth only, so a row of x has the same results alone and in a batch.
template <class V, class S, int P, int Q>
void multiply_tile(const S* const* weight_rows, int64_t depth, const Number<V>* x, int64_t x_row, V* sums) {
  const S* w[P];
  UNROLLED (i, P) w[i] = weight_rows[i];
  V total[Q][P];
  UNROLLED (q, Q)
    UNROLLED (i, P) total[q][i] = Lanes<V>::zero();
  const int64_t whole = depth / kStep<V> * kStep<V>;
  for (int64_t begin = 0; begin < whole;) {
    const int64_t chain = begin + kChain / 2 * kStep<V>, end = chain < whole ? chain : whole;
    V sum[Q][P];
    UNROLLED (q, Q)
      UNROLLED (i, P) sum[q][i] = Lanes<V>::zero();
    for (; begin < end; begin += kStep<V>) add_step<V, S, P, Q>(w, begin, x + begin, x_row, sum);
    UNROLLED (q, Q)
      UNROLLED (i, P) total[q][i] = total[q][i] + sum[q][i];
  }
  if (whole < depth) {
    S ends[P][kStep<V>];
    for (int i = 0; i < P; ++i) {
      copy_end<V>(w[i] + whole, 1, depth - whole, ends[i]);
      w[i] = ends[i];
    }
    add_step<V, S, P, Q>(w, 0, x + whole, x_row, total);
  }
  UNROLLED (q, Q)
    UNROLLED (i, P) sums[q * kBlock<V> + i] = total[q][i];
}

// Multiplies a block of W by Q rows of x.
template <class V, class S, int P, int Q>
void multiply_block(const S* const* weight_rows, int64_t depth, const Number<V>* x, int64_t x_row, V* sums) {
  for (int i = 0; i < kBlock<V>; i += P)
    multiply_tile<V, S, P, Q>(weight_rows + i, depth, x, x_row, sums + i);
}

template <class V, class S>
void multiply(int64_t q, const S* const* weight_rows, int64_t depth, const Number<V>* x, int64_t x_row,
              V* sums) {
  switch (q) {
    case 1: return multiply_block<V, S, kRowsAlone, 1>(weight_rows, depth, x, x_row, sums);
    case 2: return multiply_block<V, S, kRows, 2>(weight_rows, depth, x, x_row, sums);
    case 3: return multiply_block<V, S, kRows, 3>(weight_rows, depth, x, x_row, sums);
    default: return multiply_block<V, S, kRows, kMostX<V>>(weight_rows, depth, x, x_row, sums);
  }
}

// Adds the lanes of a block's sums and the bias, and writes `count` columns of one row of the output.
template <class V, class S>
void finish(V* sums, int64_t count, const S* bias, S* out) {
  Number<V> results[kBlock<V>];
  for (int i = 0; i < kBlock<V>; i += V::N) {
    V group[V::N];
    UNROLLED (j, V::N) group[j] = sums[i + j];
    Lanes<V>::store(results + i, lane_sums(group));
  }
  for (int64_t i = 0; i < count; ++i)
    from_float(out + i, bias ? results[i] + static_cast<Number<V>>(to_float(bias[i])) : results[i]);
}

// Computes columns [begin, begin + count) of the output. Rows of W beyond them repeat the last one.
template <class V, class S>
void run_block(const Projection& p, const Number<V>* x, int64_t begin, int64_t count) {
  const S* weight_rows[kBlock<V>];
  for (int64_t i = 0; i < kBlock<V>; ++i)
    weight_rows[i] = static_cast<const S*>(p.weight) + (begin + (i < count ? i : count - 1)) * p.weight_row;
  const S* bias = p.bias ? static_cast<const S*>(p.bias) + begin : nullptr;
  const int64_t x_row = padded_depth<V>(p), groups = (p.rows + kMostX<V> - 1) / kMostX<V>;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t row = g * p.rows / groups, rows = (g + 1) * p.rows / groups - row;
    V sums[kMostX<V> * kBlock<V>];
    multiply<V>(rows, weight_rows, p.depth, x + row * x_row, x_row, sums);
    for (int64_t q = 0; q < rows; ++q)
      finish(sums + q * kBlock<V>, count, bias, static_cast<S*>(p.out) + (row + q) * p.width + begin);
  }
}

template <class V, class S>
void run_columns(const Projection& p, const void* packed, int64_t begin, int64_t end) {
  for (; begin < end; begin += kBlock<V>)
    run_block<V, S>(p, static_cast<const Number<V>*>(packed), begin,
                    end - begin < kBlock<V> ? end - begin : kBlock<V>);
}

template <class V, class S>
constexpr ProjectionKernels projection_kernels() {
  return {packed_bytes<V>, pack_rows<V, S>, run_columns<V, S>};
}

}  // namespace

const ProjectionKernels REGARD_TABLE(projection)[4] = REGARD_EACH_DTYPE(projection_kernels);
