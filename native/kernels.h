// What each instruction set offers to the rest of the core.
#pragma once
#include "types.h"

namespace regard {

struct Kernels {
  const char* name;
  int panel_float, panel_double;  // query rows in a panel
  // Indexed by DType.
  void (*forward[4])(const Task&);
  int64_t (*scratch_bytes[4])(const Spec&, int panels, bool copy_k, bool copy_v);
  // Machine probes: floating point operations done, or a checksum of bytes read.
  double (*fma_probe)(int64_t rounds);
  double (*read_probe)(const float* data, int64_t count);
};

}  // namespace regard

extern "C" {
extern const regard::Kernels regard_kernels_generic;
extern const regard::Kernels regard_kernels_wide;
extern const regard::Kernels regard_kernels_avx2;
}
