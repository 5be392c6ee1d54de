// Transforms the scores of one query row: softcap, bias, mask, softmax weights, dropout. The
// counterpart of scores.inl.h with keys in the lanes. Rows are padded to whole vectors.
#pragma once
#include "kernels/arena.inl.h"
#include "kernels/scores.inl.h"

namespace {

// Coordinates of a row of scores. Its element c is key `key + c * key_step`; the query has position
// `position`.
struct RowCoords {
  int64_t batch, head, row, position;
  int64_t key, key_step;
};

template <class V>
void soft_cap(Number<V>* scores, int64_t count, Number<V> cap) {
  const V factor = Lanes<V>::set(cap);
  for (int64_t i = 0; i < count; i += V::N) {
    V x[] = {Lanes<V>::load(scores + i)};
    tanh_of(x);
    Lanes<V>::store(scores + i, x[0] * factor);
  }
}

template <class V, class S>
void add_tensor_bias(const S* bias, const Strides& s, const RowCoords& at, int64_t n, Number<V>* scores) {
  using Scalar = Number<V>;
  const S* first = bias + at.batch * s.b + at.head * s.h + at.row * s.l + at.key * s.d;
  const int64_t step = s.d * at.key_step;
  const Biased<V> put{static_cast<Scalar>(kLog2E)};
  int64_t c = 0;
  for (; step == 1 && c + V::N <= n; c += V::N)
    Lanes<V>::store(scores + c, put(Lanes<V>::load(scores + c), Lanes<V>::load(first + c)));
  for (; c < n; ++c) scores[c] = put(scores[c], static_cast<Scalar>(to_float(first[c * step])));
}

template <class V>
void add_alibi(Number<V> slope, const RowCoords& at, int64_t n, Number<V>* scores) {
  using Scalar = Number<V>;
  const V factor = Lanes<V>::set(static_cast<Scalar>(-slope * kLog2E));
  const V step = Lanes<V>::set(static_cast<Scalar>(-at.key_step)), lowest = Lanes<V>::set(Biased<V>::kLowest);
  for (int64_t c = 0; c < n; c += V::N) {
    const V first = Lanes<V>::set(static_cast<Scalar>(at.position - (at.key + c * at.key_step)));
    const V distance = abs(fma(Lanes<V>::iota(), step, first));
    Lanes<V>::store(scores + c, max(lowest, fma_once(distance, factor, Lanes<V>::load(scores + c))));
  }
}

// Distances beyond the table's ends use its first or last column.
template <class V>
void add_relative(const Number<V>* table, int64_t low, int64_t count, const RowCoords& at, int64_t n,
                  Number<V>* scores) {
  const Biased<V> put{static_cast<Number<V>>(kLog2E)};
  for (int64_t c = 0; c < n; c += V::N) {
    Number<V> lane[V::N];
    const int64_t first = at.position - (at.key + c * at.key_step) - low;
    for (int i = 0; i < V::N; ++i) lane[i] = table[clamp_index(first - i * at.key_step, count)];
    Lanes<V>::store(scores + c, put(Lanes<V>::load(scores + c), Lanes<V>::load(lane)));
  }
}

template <class V, class S>
void add_bias(const Spec& spec, const Call& call, const RowCoords& at, int64_t n, Number<V>* scores) {
  using Scalar = Number<V>;
  const Scalar* by_head = static_cast<const Scalar*>(call.by_head);
  if (spec.bias == kAlibi) add_alibi<V>(by_head[at.head], at, n, scores);
  if (spec.bias == kRelative)
    add_relative<V>(by_head + at.head * call.distances, call.distance_low, call.distances, at, n, scores);
  if (spec.bias != kTensorBias) return;
  if (spec.bias_dtype == kFloat32)
    add_tensor_bias<V>(static_cast<const float*>(call.bias), spec.bias_stride, at, n, scores);
  else
    add_tensor_bias<V>(static_cast<const S*>(call.bias), spec.bias_stride, at, n, scores);
}

// Returns the index of the first span that ends after `key`.
inline int64_t first_span_after(const SpanList& list, int64_t key) {
  int64_t low = 0, high = list.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (list.spans[middle].end > key)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Sets the scores of keys in [begin, end) that the row in `lane` may not attend to, and the padding
// of the last vector, to -inf.
template <class V>
void mask_row(const SpanList& list, int lane, int64_t begin, int64_t end, Number<V>* scores) {
  const auto fill = [&](int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) scores[j - begin] = static_cast<Number<V>>(-__builtin_inf());
  };
  int64_t next = begin;
  for (int64_t i = first_span_after(list, begin); i < list.count && list.spans[i].begin < end; ++i) {
    if (!(list.spans[i].lanes >> lane & 1)) continue;
    fill(next, list.spans[i].begin);
    next = list.spans[i].end < end ? list.spans[i].end : end;
  }
  fill(next, begin + round_up(end - begin, V::N));
}

// Returns the largest score, ignoring NaN.
template <class V>
Number<V> max_of_row(const Number<V>* scores, int64_t n) {
  V lane_max = Lanes<V>::set(static_cast<Number<V>>(-__builtin_inf()));
  for (int64_t c = 0; c < n; c += V::N) lane_max = max(Lanes<V>::load(scores + c), lane_max);
  Number<V> lane[V::N];
  Lanes<V>::store(lane, lane_max);
  for (int i = 1; i < V::N; ++i) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
  return lane[0];
}

// Replaces scores by 2^(scores - shift). Returns their sum, whose order does not depend on V::N: two
// sums with the lanes of a cache line are added, then the lanes.
template <class V>
Number<V> exponentiate_row(Number<V>* scores, int64_t n, V shift) {
  constexpr int kParts = 64 / sizeof(V), kPartials = 2 * kParts;
  V sum[kPartials];
  for (V& part : sum) part = Lanes<V>::zero();
  const auto add = [&](int64_t c, V& part) REGARD_ALWAYS {
    const V weight = exp2(Lanes<V>::load(scores + c) - shift);
    Lanes<V>::store(scores + c, weight);
    part = part + weight;
  };
  int64_t c = 0;
  for (; c + kPartials * V::N <= n; c += kPartials * V::N)
    UNROLLED (i, kPartials) add(c + i * V::N, sum[i]);
  UNROLLED (i, kPartials)
    if (c + i * V::N < n) add(c + i * V::N, sum[i]);
  Number<V> lane[kParts * V::N], total = 0;
  for (int i = 0; i < kParts; ++i) Lanes<V>::store(lane + i * V::N, sum[i] + sum[kParts + i]);
  for (const Number<V> x : lane) total += x;
  return total;
}

template <class V>
void drop_row(uint64_t stream, int64_t key, int64_t key_step, uint32_t drop_below, int64_t n,
              Number<V>* weights) {
  for (int64_t c = 0; c < n; ++c)
    if (dropped(stream, key + c * key_step, drop_below)) weights[c] = 0;
}

}  // namespace
