// The structs of types.h and write.h in Python. What a field means is said there.
#include "bind/fields.h"
#include "passes/write.h"

#define NEEDED(field) \
  Field<&Self::field, false> { #field }
#define OPTIONAL(field) \
  Field<&Self::field, true> { #field }

namespace regard {
namespace {

void bind_attention(nb::module_& m) {
  {
    using Self = Spec;
    bind_struct<Self>(m, "Spec", NEEDED(dtype), NEEDED(bias_dtype), NEEDED(bias), NEEDED(B), NEEDED(Hq),
                      NEEDED(Hkv), NEEDED(Lq), NEEDED(Lk), NEEDED(D), NEEDED(Dv), NEEDED(q), NEEDED(k),
                      NEEDED(v), NEEDED(out), NEEDED(bias_stride), NEEDED(scale), NEEDED(softcap),
                      NEEDED(drop_below), NEEDED(keep_scale), OPTIONAL(store), OPTIONAL(k_scale),
                      OPTIONAL(v_scale), OPTIONAL(page), OPTIONAL(pages));
  }
  {
    using Self = MaskTensor;
    bind_struct<Self>(m, "MaskTensor", NEEDED(data), NEEDED(size), NEEDED(stride));
  }
  {
    using Self = Extras;
    bind_struct<Self>(m, "Extras", OPTIONAL(stats), OPTIONAL(rest), OPTIONAL(bias), OPTIONAL(by_head),
                      OPTIONAL(distance_low), OPTIONAL(distances), OPTIONAL(sink), OPTIONAL(offsets),
                      OPTIONAL(seed), OPTIONAL(tensors));
  }
  {
    using Self = Gradients;
    bind_struct<Self>(m, "Gradients", NEEDED(out), NEEDED(rest), NEEDED(dout), NEEDED(dout_stride),
                      NEEDED(dlse), NEEDED(stats), NEEDED(dq), NEEDED(dk), NEEDED(dk_stride), NEEDED(dv),
                      NEEDED(dv_stride), NEEDED(dbias), NEEDED(dbias_stride), NEEDED(dby_head),
                      NEEDED(dsink));
  }
  {
    using Self = Facts;
    bind_struct<Self>(m, "Facts", OPTIONAL(k), OPTIONAL(top_weights), OPTIONAL(top_keys), OPTIONAL(nats),
                      OPTIONAL(choices), OPTIONAL(column_mass), OPTIONAL(row_weights),
                      OPTIONAL(row_weights_batch), OPTIONAL(histogram), OPTIONAL(distance_low),
                      OPTIONAL(distances), OPTIONAL(sets), OPTIONAL(chosen), OPTIONAL(mass_on),
                      OPTIONAL(block), OPTIONAL(block_mass), OPTIONAL(block_max), OPTIONAL(n_rows),
                      OPTIONAL(rows), OPTIONAL(row_values));
  }
}

void bind_writing(nb::module_& m) {
  {
    using Self = Side;
    bind_struct<Self>(m, "Side", NEEDED(source), NEEDED(source_stride), NEEDED(target), NEEDED(target_stride),
                      NEEDED(scales), NEEDED(scale_stride), NEEDED(width));
  }
  {
    using Self = Write;
    bind_struct<Self>(m, "Write", NEEDED(dtype), NEEDED(store), NEEDED(B), NEEDED(H), NEEDED(table),
                      NEEDED(table_stride), NEEDED(page), NEEDED(pages), NEEDED(sides));
  }
  {
    using Self = Token;
    bind_struct<Self>(m, "Token", NEEDED(k), NEEDED(k_stride), NEEDED(v), NEEDED(v_stride));
  }
}

void bind_linear(nb::module_& m) {
  {
    using Self = LinearSpec;
    bind_struct<Self>(m, "LinearSpec", NEEDED(dtype), NEEDED(B), NEEDED(Hq), NEEDED(Hkv), NEEDED(L),
                      NEEDED(D), NEEDED(Dv), NEEDED(q), NEEDED(k), NEEDED(v), NEEDED(out), NEEDED(scale),
                      NEEDED(normalize));
  }
  {
    using Self = LinearCall;
    bind_struct<Self>(m, "LinearCall", NEEDED(q), NEEDED(k), NEEDED(v), OPTIONAL(out), NEEDED(log_decay),
                      NEEDED(beta), NEEDED(lengths), NEEDED(S), NEEDED(z), OPTIONAL(S_end), OPTIONAL(z_end),
                      OPTIONAL(S_kept), OPTIONAL(z_kept), OPTIONAL(errors));
  }
  {
    using Self = LinearGradients;
    bind_struct<Self>(m, "LinearGradients", NEEDED(dout), NEEDED(dout_stride), NEEDED(dS_end), NEEDED(dz_end),
                      NEEDED(dq), NEEDED(dq_stride), NEEDED(dk), NEEDED(dk_stride), NEEDED(dv),
                      NEEDED(dv_stride), NEEDED(dlog_decay), NEEDED(dbeta), NEEDED(dS), NEEDED(dz));
  }
}

}  // namespace

void bind_structs(nb::module_& m) {
  bind_attention(m);
  bind_writing(m);
  bind_linear(m);
}

}  // namespace regard
