// Attention of one query row in double precision, key by key, with an online softmax. The slow path
// for rows whose fast result is non-finite because a masked key or value held NaN or a product
// overflowed: it reads only the keys that the row may attend to.
#pragma once
#include "kernels/scores.inl.h"

namespace {

inline double bias_element(const Spec& spec, const Call& call, int64_t index) {
  switch (spec.bias_dtype) {
    case kFloat32: return static_cast<const float*>(call.bias)[index];
    case kFloat64: return static_cast<const double*>(call.bias)[index];
    case kBFloat16: return to_float(static_cast<const BHalf*>(call.bias)[index]);
    default: return to_float(static_cast<const Half*>(call.bias)[index]);
  }
}

// Returns the bias of query row i with position `position` and key j.
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
      return by_head[h * call.distances + clamp_index(position - j - call.distance_low, call.distances)];
    default: return 0;
  }
}

inline bool attends_to_any(const Panel& p, int lane) {
  bool any = false;
  for (int64_t n = 0; n < p.n_spans && !any; ++n) any = p.spans[n].lanes >> lane & 1;
  return any;
}

template <class V, class S>
struct ExactRow {
  using Scalar = Number<V>;
  static constexpr double kMaxMagnitude = sizeof(Scalar) == 4 ? 0x1p120 : 0x1p1016;
  const Task& task;
  const Panel& panel;
  int lane;
  double* sum;  // (Dv): weighted values
  double max, total;
  bool overflows = false;  // a score, or a term of one, exceeds the compute type's range

  int64_t row() const { return panel.row + lane * task.row_step; }

  int64_t position() const {
    return (task.call->offsets ? task.call->offsets[task.batch] : task.call->offset) + row();
  }

  double bias(int64_t j) const {
    return bias_for<Scalar>(*task.spec, *task.call, task.batch, panel.head, row(), position(), j);
  }

  // Calls visit(key) for every key that the row may attend to.
  template <class Visit>
  void visit_keys(Visit visit) const {
    for (int64_t n = 0; n < panel.n_spans; ++n) {
      const Span& span = panel.spans[n];
      if (!(span.lanes >> lane & 1)) continue;
      for (int64_t c = span.begin; c < span.end; ++c) visit(task.key + c * task.key_step);
    }
  }

  // Returns the largest bias. It replaces the LSE if the biases are so large that adding a score
  // does not change them.
  double max_bias() const {
    double result = -__builtin_inf();
    visit_keys([&](int64_t j) { result = bias(j) > result ? bias(j) : result; });
    return result;
  }

  double score(const S* q, int64_t j) {
    return score(q, key_row(task.call->k, task.spec->k, j), task.spec->k.d, j);
  }

  template <class K>
  double score(const S* q, const K* k, int64_t stride, int64_t j) {
    const Spec& spec = *task.spec;
    const double bias_value = bias(j);
    if (bias_value == -__builtin_inf()) return bias_value;
    double dot = 0, magnitude = 0;
    for (int64_t d = 0; d < spec.D; ++d) {
      const double x =
          static_cast<double>(to_float(q[d * spec.q.d])) * static_cast<double>(to_float(k[d * stride]));
      dot += x;
      magnitude += fabs(x);
    }
    overflows |= magnitude * fmax(fabs(spec.scale), 1) > kMaxMagnitude;
    dot *= spec.scale;
    if (spec.softcap > 0) dot = spec.softcap * tanh(dot / spec.softcap);
    return dot + bias_value;
  }

  template <class K>
  void add(double s, const K* v, int64_t stride, bool kept) {
    if (s == -__builtin_inf()) return;
    const double shift = s > max ? s : max;
    const double decay = total == 0 && max == -__builtin_inf() ? 0 : exp(max - shift), power = exp(s - shift);
    const int64_t Dv = task.spec->Dv;
    const double weight = kept ? power : 0;  // not skipped: 0 * NaN is NaN, so a NaN value shows
    for (int64_t d = 0; d < Dv; ++d)
      sum[d] = sum[d] * decay + weight * static_cast<double>(to_float(v[d * stride]));
    total = total * decay + power;
    max = shift;
  }

  const S* query() const {
    const Spec& spec = *task.spec;
    return static_cast<const S*>(task.call->q) + task.batch * spec.q.b + panel.head * spec.q.h +
           row() * spec.q.l;
  }

  const S* key_row(const void* base, const Strides& s, int64_t j) const {
    return static_cast<const S*>(base) + task.batch * s.b + task.kv_head * s.h + j * s.l;
  }

  // Returns whether the query holds NaN and the row attends to some key: then the row is NaN, and
  // recomputing it is useless.
  bool query_is_nan() const {
    const Spec& spec = *task.spec;
    bool nan = false;
    for (int64_t d = 0; d < spec.D; ++d)
      nan |= to_float(query()[d * spec.q.d]) != to_float(query()[d * spec.q.d]);
    return nan && attends_to_any(panel, lane) && spec.bias != kTensorBias;
  }

  bool keeps(uint64_t stream, int64_t j) const {
    const uint32_t drop_below = task.spec->drop_below;
    return !drop_below || !dropped(stream, task.call->origin.key + j, drop_below);
  }

  // Resets the softmax, then calls visit(key, query, whether dropout keeps the weight) for every
  // key that the row may attend to.
  template <class Visit>
  void run(Visit visit) {
    const Spec& spec = *task.spec;
    const Call& call = *task.call;
    const int64_t h = panel.head;
    const S* q = query();
    const uint64_t stream = dropout_stream(spec, call, task.batch, h, row());
    for (int64_t d = 0; d < spec.Dv; ++d) sum[d] = 0;
    max = call.sink ? static_cast<double>(static_cast<const Scalar*>(call.sink)[h]) : -__builtin_inf();
    total = call.sink ? 1 : 0;
    visit_keys([&](int64_t j) { visit(j, q, keeps(stream, j)); });
  }

  void run() {
    const Spec& spec = *task.spec;
    run([&](int64_t j, const S* q, bool kept) {
      add(score(q, j), key_row(task.call->v, spec.v, j), spec.v.d, kept);
    });
  }

  // The softmax statistics that backward reads: an integer shift in base 2 and the sum times
  // 2^-shift. A sum of -1 marks a row for the exact backward pass.
  Scalar shift() const { return static_cast<Scalar>(::ceil(max * kLog2E)); }
  Scalar sum_at_shift() const {
    if (overflows) return -1;
    return static_cast<Scalar>(total == 0 ? 0 : total * ::exp2(max * kLog2E - ::ceil(max * kLog2E)));
  }

  // Writes the row to out[first], and its residual and LSE.
  void write(S* out, int64_t first, Scalar* lse) const {
    const Spec& spec = *task.spec;
    S* residual = static_cast<S*>(task.call->residual);
    if (residual) residual += out - static_cast<S*>(task.call->out);
    for (int64_t d = 0; d < spec.Dv; ++d) {
      const int64_t index = first + d * spec.out.d;
      const Scalar x = static_cast<Scalar>(total == 0 ? 0 : sum[d] / total * spec.keep_scale);
      from_float(out + index, x);
      if (residual) from_float(residual + index, x - static_cast<Scalar>(to_float(out[index])));
    }
    if (lse) *lse = static_cast<Scalar>(total == 0 ? -__builtin_inf() : max + log(total));
  }
};

template <class V, class S>
Number<V> lse_of(const ExactRow<V, S>& row, Number<V> shift, Number<V> total, bool only_sink) {
  using Scalar = Number<V>;
  if (total == 0) return static_cast<Scalar>(-__builtin_inf());
  if (only_sink) return static_cast<const Scalar*>(row.task.call->sink)[row.panel.head];
  if (total == total && shift < Biased<V>::kLowest / 2) return static_cast<Scalar>(row.max_bias());
  return static_cast<Scalar>(static_cast<double>(shift) * kLn2 + log(static_cast<double>(total)));
}

}  // namespace
