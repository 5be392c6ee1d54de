// Binds the structs of types.h and write.h, which document the fields.
#include "bind/fields.h"
#include "passes/write.h"

#define NEEDED(field) \
  Field<&Self::field, false> { #field }
#define OPTIONAL(field) \
  Field<&Self::field, true> { #field }
#define STRUCT(name, ...)                     \
  {                                           \
    using Self = name;                        \
    bind_struct<Self>(m, #name, __VA_ARGS__); \
  }

namespace regard {

void bind_structs(nb::module_& m) {
  STRUCT(Spec, NEEDED(dtype), NEEDED(bias_dtype), NEEDED(bias), NEEDED(B), NEEDED(Hq), NEEDED(Hkv),
         NEEDED(Lq), NEEDED(Lk), NEEDED(D), NEEDED(Dv), NEEDED(q), NEEDED(k), NEEDED(v), NEEDED(out),
         NEEDED(bias_stride), NEEDED(scale), NEEDED(softcap), NEEDED(drop_below), NEEDED(keep_scale),
         OPTIONAL(store), OPTIONAL(k_scale), OPTIONAL(v_scale), OPTIONAL(page), OPTIONAL(pages))
  STRUCT(MaskTensor, NEEDED(data), NEEDED(size), NEEDED(stride))
  STRUCT(Operands, OPTIONAL(bias), OPTIONAL(by_head), OPTIONAL(distance_low), OPTIONAL(distances),
         OPTIONAL(sink), OPTIONAL(offsets), OPTIONAL(seed), OPTIONAL(origin), OPTIONAL(tensors))
  STRUCT(Gradients, NEEDED(out), NEEDED(residual), NEEDED(dout), NEEDED(dout_stride), NEEDED(dlse),
         NEEDED(stats), NEEDED(dq), NEEDED(dk), NEEDED(dk_stride), NEEDED(dv), NEEDED(dv_stride),
         NEEDED(dbias), NEEDED(dbias_stride), NEEDED(dby_head), NEEDED(dsink))
  STRUCT(Facts, OPTIONAL(k), OPTIONAL(top_weights), OPTIONAL(top_keys), OPTIONAL(nats), OPTIONAL(choices),
         OPTIONAL(column_mass), OPTIONAL(row_weights), OPTIONAL(row_weights_batch), OPTIONAL(histogram),
         OPTIONAL(distance_low), OPTIONAL(distances), OPTIONAL(sets), OPTIONAL(chosen), OPTIONAL(mass_on),
         OPTIONAL(block), OPTIONAL(block_mass), OPTIONAL(block_max), OPTIONAL(n_rows), OPTIONAL(rows),
         OPTIONAL(row_values))
  STRUCT(Side, NEEDED(source), NEEDED(source_stride), NEEDED(target), NEEDED(target_stride), NEEDED(scales),
         NEEDED(scale_stride), NEEDED(width))
  STRUCT(Write, NEEDED(dtype), NEEDED(store), NEEDED(B), NEEDED(H), NEEDED(table), NEEDED(table_stride),
         NEEDED(page), NEEDED(pages), NEEDED(sides))
  STRUCT(Token, NEEDED(k), NEEDED(k_stride), NEEDED(v), NEEDED(v_stride))
  STRUCT(LinearSpec, NEEDED(dtype), NEEDED(B), NEEDED(Hq), NEEDED(Hkv), NEEDED(L), NEEDED(D), NEEDED(Dv),
         NEEDED(q), NEEDED(k), NEEDED(v), NEEDED(out), NEEDED(scale), NEEDED(normalize))
  STRUCT(LinearCall, NEEDED(q), NEEDED(k), NEEDED(v), NEEDED(out), NEEDED(log_decay), NEEDED(beta),
         NEEDED(lengths), NEEDED(S), NEEDED(z), NEEDED(S_end), NEEDED(z_end), NEEDED(S_kept), NEEDED(z_kept),
         NEEDED(errors))
  STRUCT(LinearGradients, NEEDED(dout), NEEDED(dout_stride), NEEDED(dS_end), NEEDED(dz_end), NEEDED(dq),
         NEEDED(dq_stride), NEEDED(dk), NEEDED(dk_stride), NEEDED(dv), NEEDED(dv_stride), NEEDED(dlog_decay),
         NEEDED(dbeta), NEEDED(dS), NEEDED(dz))
}

}  // namespace regard
