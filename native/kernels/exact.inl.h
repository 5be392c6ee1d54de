// One query row in double precision, key by key, looking only at keys that the row sees. Slow: it spans again
// the rows whose fast result is not finite, because a hidden key held a NaN or a product overflowed.
#pragma once
#include "kernels/scores.inl.h"

namespace {

inline double bias_element(const Spec& spec, const Call& call, int64_t at) {
  switch (spec.bias_dtype) {
    case kFloat32: return static_cast<const float*>(call.bias)[at];
    case kFloat64: return static_cast<const double*>(call.bias)[at];
    case kBFloat16: return to_float(static_cast<const BHalf*>(call.bias)[at]);
    default: return to_float(static_cast<const Half*>(call.bias)[at]);
  }
}

// What the bias adds for query row i at `position` and key j.
template <class Scalar>
double bias_for(const Spec& spec, const Call& call, int64_t b, int64_t h, int64_t i, int64_t position,
                int64_t j) {
  const Strides& s = spec.bias_stride;
  const Scalar* by_head = static_cast<const Scalar*>(call.by_head);
  switch (spec.bias) {
    case kTensorBias: return bias_element(spec, call, b * s.b + h * s.h + i * s.l + j * s.d);
    case kAlibi:
      return -static_cast<double>(by_head[h]) *
             static_cast<double>(position < j ? j - position : position - j);
    case kRelative:
      return by_head[h * call.distances + clamped(position - j - call.distance_low, call.distances)];
    default: return 0;
  }
}

inline bool sees(const Panel& p, int lane) {
  bool any = false;
  for (int64_t n = 0; n < p.n_spans && !any; ++n) any = p.spans[n].lanes >> lane & 1;
  return any;
}

template <class V, class S>
struct ExactRow {
  using Scalar = Number<V>;
  static constexpr double kLargestSize = sizeof(Scalar) == 4 ? 0x1p120 : 0x1p1016;
  const Task& task;
  const Panel& panel;
  int lane;
  double* sum;  // (Dv), weighted values
  double top, total;
  bool overflows = false;  // some score, or a part of it, is beyond the compute type

  int64_t row() const { return panel.row + lane * task.row_step; }

  int64_t position() const {
    return (task.call->offsets ? task.call->offsets[task.batch] : task.call->offset) + row();
  }

  double bias(int64_t j) const {
    return bias_for<Scalar>(*task.spec, *task.call, task.batch, panel.head, row(), position(), j);
  }

  // Calls visit(key) for every key that the row sees.
  template <class Visit>
  void each_key(Visit visit) const {
    for (int64_t n = 0; n < panel.n_spans; ++n) {
      const Span& span = panel.spans[n];
      if (!(span.lanes >> lane & 1)) continue;
      for (int64_t c = span.begin; c < span.end; ++c) visit(task.key + c * task.key_step);
    }
  }

  // The LSE where biases are so large that they swallow everything else.
  double largest_bias() const {
    double most = -__builtin_inf();
    each_key([&](int64_t j) { most = bias(j) > most ? bias(j) : most; });
    return most;
  }

  double score(const S* q, int64_t j) {
    return score(q, key_row(task.call->k, task.spec->k, j), task.spec->k.d, j);
  }

  template <class K>
  double score(const S* q, const K* k, int64_t stride, int64_t j) {
    const Spec& spec = *task.spec;
    const double added = bias(j);
    if (added == -__builtin_inf()) return added;
    double dot = 0, size = 0;
    for (int64_t d = 0; d < spec.D; ++d) {
      const double x =
          static_cast<double>(to_float(q[d * spec.q.d])) * static_cast<double>(to_float(k[d * stride]));
      dot += x;
      size += fabs(x);
    }
    overflows |= size * fmax(fabs(spec.scale), 1) > kLargestSize;
    dot *= spec.scale;
    if (spec.softcap > 0) dot = spec.softcap * tanh(dot / spec.softcap);
    return dot + added;
  }

  template <class K>
  void add(double s, const K* v, int64_t stride, bool kept) {
    if (s == -__builtin_inf()) return;
    const double shift = s > top ? s : top;
    const double old = total == 0 && top == -__builtin_inf() ? 0 : exp(top - shift), now = exp(s - shift);
    const int64_t Dv = task.spec->Dv;
    const double weight = kept ? now : 0;  // 0 * NaN is NaN: an attended NaN shows, dropped or negligible
    for (int64_t d = 0; d < Dv; ++d)
      sum[d] = sum[d] * old + weight * static_cast<double>(to_float(v[d * stride]));
    total = total * old + now;
    top = shift;
  }

  const S* query() const {
    const Spec& spec = *task.spec;
    return static_cast<const S*>(task.call->q) + task.batch * spec.q.b + panel.head * spec.q.h +
           row() * spec.q.l;
  }

  const S* key_row(const void* base, const Strides& s, int64_t j) const {
    return static_cast<const S*>(base) + task.batch * s.b + task.kv_head * s.h + j * s.l;
  }

  // A NaN in the query reaches every score: there is nothing to mend, if the row sees any key.
  bool query_is_nan() const {
    const Spec& spec = *task.spec;
    bool nan = false;
    for (int64_t d = 0; d < spec.D; ++d)
      nan |= to_float(query()[d * spec.q.d]) != to_float(query()[d * spec.q.d]);
    return nan && sees(panel, lane) && spec.bias != kTensorBias;
  }

  // visit(key, query row, whether its weight is kept) for every key that the row sees; then the row is done.
  template <class Visit>
  void walk(Visit visit) {
    const Spec& spec = *task.spec;
    const Call& call = *task.call;
    const int64_t b = task.batch, h = panel.head;
    const S* q = query();
    const uint64_t stream = dropout_stream(call.seed, b * spec.Hq + h, row());
    for (int64_t d = 0; d < spec.Dv; ++d) sum[d] = 0;
    top = call.sink ? static_cast<double>(static_cast<const Scalar*>(call.sink)[h]) : -__builtin_inf();
    total = call.sink ? 1 : 0;
    each_key([&](int64_t j) { visit(j, q, !spec.drop_below || !dropped(stream, j, spec.drop_below)); });
  }

  void walk() {
    const Spec& spec = *task.spec;
    walk([&](int64_t j, const S* q, bool kept) {
      add(score(q, j), key_row(task.call->v, spec.v, j), spec.v.d, kept);
    });
  }

  // The sum as backward wants it: times 2^-shift, for an integer shift in base 2, negative if it is no use.
  Scalar shift() const { return static_cast<Scalar>(::ceil(top * kLog2E)); }
  Scalar sum_at_shift() const {
    if (overflows) return -1;
    return static_cast<Scalar>(total == 0 ? 0 : total * ::exp2(top * kLog2E - ::ceil(top * kLog2E)));
  }

  // The row starts `first` elements from `out`.
  void write(S* out, int64_t first, Scalar* lse) const {
    const Spec& spec = *task.spec;
    S* residual = static_cast<S*>(task.call->residual);
    if (residual) residual += out - static_cast<S*>(task.call->out);
    for (int64_t d = 0; d < spec.Dv; ++d) {
      const int64_t at = first + d * spec.out.d;
      const Scalar x = static_cast<Scalar>(total == 0 ? 0 : sum[d] / total * spec.keep_scale);
      from_float(out + at, x);
      if (residual) from_float(residual + at, x - static_cast<Scalar>(to_float(out[at])));
    }
    if (lse) *lse = static_cast<Scalar>(total == 0 ? -__builtin_inf() : top + log(total));
  }
};

template <class V, class S>
Number<V> lse_of(const ExactRow<V, S>& row, Number<V> shift, Number<V> total, bool only_sink) {
  using Scalar = Number<V>;
  if (total == 0) return static_cast<Scalar>(-__builtin_inf());
  if (only_sink) return static_cast<const Scalar*>(row.task.call->sink)[row.panel.head];
  if (total == total && shift < Biased<V>::kLowest / 2) return static_cast<Scalar>(row.largest_bias());
  return static_cast<Scalar>(static_cast<double>(shift) * kLn2 + log(static_cast<double>(total)));
}

}  // namespace
