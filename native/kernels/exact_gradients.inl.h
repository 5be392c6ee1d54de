// Gradients of one query row in double precision, key by key: the slow path for rows that forward
// marked because their scores exceed the range of the compute type. dk and dv are summed
// separately, before the other rows; dq, dbias and dsink are added to finished results.
#pragma once
#include "kernels/exact.inl.h"

namespace {

template <class T>
inline void add_to(T* p, double x) {
  from_float(p, static_cast<decltype(to_float(*p))>(static_cast<double>(to_float(*p)) + x));
}

template <class V, class S>
struct ExactGradients {
  using Scalar = Number<V>;
  const Task& task;
  const Panel& panel;
  const Gradients& grads;
  const Spec& spec;
  const Call& call;
  ExactRow<V, S> row;
  const S *q, *dout;
  double lse, delta;

  ExactGradients(const Task& t, const Panel& p, const Gradients& g)
      : task(t), panel(p), grads(g), spec(*t.spec), call(*t.call),
        row{t, p, 0, static_cast<double*>(t.scratch), 0, 0} {
    const Strides& s = g.dout_stride;
    q = row.query();
    dout = static_cast<const S*>(g.dout) + t.batch * s.b + p.head * s.h + p.row * s.l;
  }

  double dot_dout(const S* v) const {
    double sum = 0;
    for (int64_t d = 0; d < spec.Dv; ++d)
      sum += static_cast<double>(to_float(dout[d * grads.dout_stride.d])) *
             static_cast<double>(to_float(v[d * spec.v.d]));
    return sum;
  }

  void run() {
    row.run();
    if (row.total == 0) return;
    lse = row.max + log(row.total);
    const int64_t i = (task.batch * spec.Hq + panel.head) * spec.Lq + panel.row;
    delta = grads.dlse ? -static_cast<double>(static_cast<const Scalar*>(grads.dlse)[i]) : 0;
    for (int64_t d = 0; d < spec.Dv; ++d)
      delta += static_cast<double>(to_float(dout[d * grads.dout_stride.d])) * row.sum[d] / row.total *
               spec.keep_scale;
    if (grads.dsink) {
      const double sink = static_cast<double>(static_cast<const Scalar*>(call.sink)[panel.head]);
      add_to(static_cast<Scalar*>(grads.dsink) + panel.head, -exp(sink - lse) * delta);
    }
    const uint64_t stream = dropout_stream(spec, call, task.batch, panel.head, panel.row);
    row.visit_keys([&](int64_t j) { add(j, row.keeps(stream, j), i); });
  }

  void add(int64_t j, bool kept, int64_t i) {
    const double s = row.score(q, j), p = exp(s - lse);
    if (p == 0) return;
    const double output_weight = kept ? p * spec.keep_scale : 0;
    const double ds = output_weight * dot_dout(row.key_row(call.v, spec.v, j)) - p * delta;
    for (int64_t d = 0; grads.dv && d < spec.Dv; ++d)
      grads.dv_exact[key_index(j) * spec.Dv + d] +=
          output_weight * static_cast<double>(to_float(dout[d * grads.dout_stride.d]));
    add_bias_gradient(j, ds);
    add_products(j, i, ds * softcap_derivative(s - row.bias(j)) * spec.scale);
  }

  int64_t key_index(int64_t j) const { return (task.batch * spec.Hkv + task.kv_head) * spec.Lk + j; }

  // Returns the softcap's derivative at the capped score.
  double softcap_derivative(double capped) const {
    const double t = spec.softcap > 0 ? capped / spec.softcap : 0;
    return 1 - t * t;
  }

  void add_products(int64_t j, int64_t i, double ds) {
    const S* k = row.key_row(call.k, spec.k, j);
    Scalar* dq = grads.dq ? static_cast<Scalar*>(grads.dq_sum) + i * spec.D : nullptr;
    for (int64_t d = 0; d < spec.D; ++d) {
      if (dq) add_to(dq + d, ds * static_cast<double>(to_float(k[d * spec.k.d])));
      if (grads.dk)
        grads.dk_exact[key_index(j) * spec.D + d] += ds * static_cast<double>(to_float(q[d * spec.q.d]));
    }
  }

  void add_bias_gradient(int64_t j, double ds) {
    const int64_t distance = row.position() - j;
    if (grads.dby_head && spec.bias == kAlibi)
      add_to(static_cast<Scalar*>(grads.dby_head) + panel.head, -ds * fabs(static_cast<double>(distance)));
    if (grads.dby_head && spec.bias == kRelative)
      add_to(static_cast<Scalar*>(grads.dby_head) + panel.head * call.distances +
                 clamp_index(distance - call.distance_low, call.distances),
             ds);
    if (!grads.dbias) return;
    const Strides& s = grads.dbias_stride;
    const int64_t index = task.batch * s.b + panel.head * s.h + panel.row * s.l + j * s.d;
    if (!bias_has_pairs(spec, grads))
      add_to(static_cast<double*>(grads.dbias) + index, ds);
    else if (spec.bias_dtype == spec.dtype)
      add_to(static_cast<S*>(grads.dbias) + index, ds);
    else
      add_to(static_cast<Scalar*>(grads.dbias) + index, ds);
  }
};

}  // namespace
