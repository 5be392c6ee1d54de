// Repeats checked calls of attention.
#pragma once
#include <nanobind/ndarray.h>

#include <string>
#include <unordered_map>

#include "bind/attention.h"

namespace regard {

using Tensor = nb::dlpack::dltensor;

// The interface through which torch.Tensor lends its memory, from dlpack.h 1.x.
struct DLPackExchange {
  struct {
    uint32_t major, minor;
    void* previous;
  } header;
  void *allocate, *from_object, *to_object;
  int (*borrow)(void* object, Tensor* out);  // 0: success; otherwise a Python exception is set
  void* stream;
};

// The arguments of `attention`, in its order. `program` is the mask's Program, or None.
struct Arguments {
  nb::handle q, k, v, program, offset, bias, scale, softcap, sink, dropout, seed, return_lse, impl;
};

// The calls of `attention` that have been checked, by signature: shapes, strides, dtypes and options of calls
// without a tensor besides q, k and v. A call whose signature is known runs without a detour through Python.
class Repeats {
 public:
  // `exchange` is torch.Tensor's DLPack exchange interface, the others are functions of PyTorch.
  Repeats(const nb::capsule& exchange, nb::callable empty_like, nb::callable empty_strided,
          nb::callable is_grad_enabled);

  // Runs a call and returns its result, out or (out, lse). Returns its Spec if the call needs gradients, or
  // None if its signature is unknown. The caller has checked that PyTorch does not watch the call.
  nb::object run(const Arguments& call) const;

  // Remembers a call that `attention` ran with these results. Does nothing if it has no signature.
  void remember(const nb::tuple& arguments, nb::object attention, nb::object spec, nb::object out,
                nb::object lse);

  void clear() { calls_.clear(); }

 private:
  struct Empty {  // arguments of torch.empty_strided
    nb::object shape, stride, dtype;
  };
  struct Checked {
    nb::object attention, spec;
    const Attention* native;
    int64_t offset;
    bool like_q;  // out has q's shape and strides
    Empty out, lse;
  };

  bool append(nb::handle tensor, Tensor& view) const;
  bool find_signature(const Arguments& call, Tensor (&views)[3]) const;
  bool needs_grad(const Arguments& call) const;
  nb::object allocate(const Empty& empty) const;
  int64_t address(nb::handle tensor) const;

  int (*borrow_)(void*, Tensor*);
  nb::callable empty_like_, empty_strided_, is_grad_enabled_;
  nb::object is_neg_, requires_grad_, tensors_, code_, auto_;  // names
  std::unordered_map<std::string, Checked> calls_;
  mutable std::string signature_;  // of the last call
};

}  // namespace regard
