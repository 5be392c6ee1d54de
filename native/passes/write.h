// Writes new tokens to a cache's storage.
#pragma once
#include <vector>

#include "machine/work.h"
#include "types.h"

namespace regard {

// New rows of K or V (B, H, L, width), and the storage that they are written to.
struct Side {
  const void* source;
  Strides source_stride;
  void* target;
  Strides target_stride;  // (sample or page, head, row) in elements, or in bytes if quantised
  void* scales;
  Strides scale_stride;  // in float16 elements
  int64_t width;
};

// New rows of K, of V, or of both.
struct Write {
  DType dtype;
  StoreKind store;
  int64_t B, H;
  const int32_t* table;  // as in Call
  int64_t table_stride, page, pages;
  std::vector<Side> sides;
};

// One new key and value of each sample. v is null if the stored values are a view of the stored keys.
struct Token {
  const void *k, *v;
  Strides k_stride, v_stride;
};

// Writes the first counts[b] new rows of sample b to slots starts[b], starts[b] + 1, ...
Outcome write(const Write& write, const std::vector<int64_t>& starts, const std::vector<int64_t>& counts);

// Writes `token` to slot spec.Lk - 1 of the call's storage.
Outcome write_token(const Spec& spec, const Call& call, const Token& token);

}  // namespace regard
