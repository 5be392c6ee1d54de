#include "bind/unpack.h"

namespace regard {
namespace {

Strides strides(const int64_t* at) { return {at[0], at[1], at[2], at[3]}; }

}  // namespace

Spec unpack_spec(const int64_t* n) {
  Spec s{};
  s.dtype = static_cast<DType>(n[0]), s.bias_dtype = static_cast<DType>(n[1]);
  s.bias = static_cast<BiasKind>(n[2]);
  s.B = n[3], s.Hq = n[4], s.Hkv = n[5], s.Lq = n[6], s.Lk = n[7], s.D = n[8], s.Dv = n[9];
  s.q = strides(n + 10), s.k = strides(n + 14), s.v = strides(n + 18), s.out = strides(n + 22);
  s.bias_stride = strides(n + 26);
  s.store = static_cast<StoreKind>(n[30]);
  s.k_scale = strides(n + 31), s.v_scale = strides(n + 35);
  s.page = n[39], s.pages = n[40];
  return s;
}

void unpack_extras(const int64_t* x, Call& call) {
  call.bias = pointer<const void>(x[0]), call.by_head = pointer<const void>(x[1]);
  call.distance_low = x[2], call.distances = x[3];
  call.sink = pointer<const void>(x[4]), call.offsets = pointer<const int64_t>(x[5]);
  call.seed = static_cast<uint64_t>(x[6]), call.stats = pointer<void>(x[7]), call.rest = pointer<void>(x[8]);
}

std::vector<MaskTensor> unpack_tensors(const Ints& numbers) {
  std::vector<MaskTensor> tensors(numbers.size() / 9);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t* at = numbers.data() + 9 * i;
    tensors[i].data = pointer<const void>(at[0]);
    for (int d = 0; d < 4; ++d) {
      tensors[i].size[d] = at[1 + d];
      tensors[i].stride[d] = at[5 + d];
    }
  }
  return tensors;
}

Write unpack_write(const Ints& numbers) {
  const int64_t* n = numbers.data();
  Write w{};
  w.dtype = static_cast<DType>(n[0]), w.store = static_cast<StoreKind>(n[1]);
  w.B = n[2], w.H = n[3], w.table = pointer<const int32_t>(n[4]);
  w.table_stride = n[5], w.page = n[6], w.pages = n[7];
  for (size_t at = kWriteNumbers; at + kSideNumbers <= numbers.size(); at += kSideNumbers) {
    const int64_t* s = n + at;
    w.sides.push_back({pointer<const void>(s[0]), strides(s + 1), pointer<void>(s[5]), strides(s + 6),
                       pointer<void>(s[10]), strides(s + 11), s[15]});
  }
  return w;
}

Write unpack_token(const Spec& spec, const Call& call, const int64_t* n) {
  Write w{spec.dtype, spec.store, spec.B, spec.Hkv, call.table, call.table_stride, spec.page, spec.pages, {}};
  const auto add = [&](const int64_t* at, const void* target, const Strides& to, const void* scales,
                       const Strides& scale, int64_t width) {
    if (at[0])
      w.sides.push_back({pointer<const void>(at[0]),
                         {at[1], at[2], 0, at[3]},
                         const_cast<void*>(target),
                         to,
                         const_cast<void*>(scales),
                         scale,
                         width});
  };
  add(n, call.k, spec.k, call.k_scale, spec.k_scale, spec.D);
  add(n + 4, call.v, spec.v, call.v_scale, spec.v_scale, spec.Dv);
  return w;
}

Gradients unpack_gradients(const int64_t* n) {
  Gradients g{};
  g.out = pointer<const void>(n[0]), g.rest = pointer<const void>(n[1]), g.dout = pointer<const void>(n[2]);
  g.dlse = pointer<const void>(n[3]), g.stats = pointer<const void>(n[4]);
  g.dq = pointer<void>(n[5]), g.dk = pointer<void>(n[6]), g.dv = pointer<void>(n[7]);
  g.dbias = pointer<void>(n[8]), g.dby_head = pointer<void>(n[9]), g.dsink = pointer<void>(n[10]);
  g.dout_stride = strides(n + 11), g.dk_stride = strides(n + 15), g.dv_stride = strides(n + 19);
  g.dbias_stride = strides(n + 23);
  return g;
}

Facts unpack_facts(const int64_t* n) {
  Facts f{};
  f.k = n[0], f.top_weights = pointer<void>(n[1]), f.top_keys = pointer<int64_t>(n[2]);
  f.nats = pointer<void>(n[3]), f.choices = pointer<int64_t>(n[4]);
  f.column_mass = pointer<double>(n[5]), f.row_weights = pointer<const void>(n[6]);
  f.row_weights_batch = n[7];
  f.histogram = pointer<double>(n[8]), f.distance_low = n[9], f.distances = n[10];
  f.sets = n[11], f.chosen = pointer<const bool>(n[12]), f.mass_on = pointer<void>(n[13]);
  f.block = n[14], f.block_mass = pointer<double>(n[15]), f.block_max = pointer<void>(n[16]);
  f.n_rows = n[17], f.rows = pointer<const int64_t>(n[18]), f.row_values = pointer<void>(n[19]);
  return f;
}

LinearSpec unpack_linear_spec(const int64_t* n) {
  LinearSpec s{};
  s.dtype = static_cast<DType>(n[0]);
  s.B = n[1], s.Hq = n[2], s.Hkv = n[3], s.L = n[4], s.D = n[5], s.Dv = n[6];
  s.normalize = n[7] != 0;
  s.q = strides(n + 8), s.k = strides(n + 12), s.v = strides(n + 16), s.out = strides(n + 20);
  return s;
}

LinearCall unpack_linear_call(const int64_t* n) {
  LinearCall c{};
  c.q = pointer<const void>(n[0]), c.k = pointer<const void>(n[1]), c.v = pointer<const void>(n[2]);
  c.out = pointer<void>(n[3]);
  c.log_decay = pointer<const void>(n[4]), c.beta = pointer<const void>(n[5]);
  c.lengths = pointer<const int64_t>(n[6]);
  c.S = pointer<const void>(n[7]), c.z = pointer<const void>(n[8]);
  c.S_end = pointer<void>(n[9]), c.z_end = pointer<void>(n[10]);
  c.S_kept = pointer<void>(n[11]), c.z_kept = pointer<void>(n[12]), c.errors = pointer<void>(n[13]);
  return c;
}

LinearGradients unpack_linear_gradients(const int64_t* n) {
  LinearGradients g{};
  g.dout = pointer<const void>(n[0]), g.dS_end = pointer<const void>(n[1]);
  g.dz_end = pointer<const void>(n[2]);
  g.dq = pointer<void>(n[3]), g.dk = pointer<void>(n[4]), g.dv = pointer<void>(n[5]);
  g.dlog_decay = pointer<void>(n[6]), g.dbeta = pointer<void>(n[7]);
  g.dS = pointer<void>(n[8]), g.dz = pointer<void>(n[9]);
  g.dout_stride = strides(n + 10), g.dq_stride = strides(n + 14);
  g.dk_stride = strides(n + 18), g.dv_stride = strides(n + 22);
  return g;
}

}  // namespace regard
