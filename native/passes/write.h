// New tokens into the storage of a cache.
#pragma once
#include <vector>

#include "machine/work.h"
#include "types.h"

namespace regard {

// Rows of K or V: (B, H, L, width) as they come, and where they are kept.
struct Side {
  const void* source;
  Strides source_stride;
  void* target;
  Strides target_stride;  // samples or pages, heads, rows; in elements, or bytes of codes
  void* scales;
  Strides scale_stride;  // in float16 numbers
  int64_t width;
};

struct Write {
  DType dtype;
  StoreKind store;
  int64_t B, H;
  const int32_t* table;  // as in Call; or null
  int64_t table_stride, page, pages;
  std::vector<Side> sides;
};

// One key and value of each sample, still to be written; v is null where values are a view of the keys.
struct Token {
  const void *k, *v;
  Strides k_stride, v_stride;
};

// Of sample b the first counts[b] rows, to rows starts[b] on.
Outcome write(const Write& write, const std::vector<int64_t>& starts, const std::vector<int64_t>& counts);

// The last of the call's spec.Lk stored keys.
Outcome write_token(const Spec& spec, const Call& call, const Token& token);

}  // namespace regard
