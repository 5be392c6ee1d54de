// What each instruction set offers to the rest of the core.
#pragma once
#include "types.h"

namespace regard {

// Panels of query rows that meet a chunk of keys together in backward, and the keys of a block there.
constexpr int kTilePanels = 4;
constexpr int64_t kBackwardBlock = 96;

struct ForwardKernels {
  int64_t (*scratch_bytes)(const Spec&, int panels, bool copy_k, bool copy_v);
  void (*run)(const Task&);
};

struct BackwardKernels {
  int64_t (*scratch_bytes)(const Spec&, const Gradients&, int64_t keys, bool copy_k, bool copy_v);
  // delta of some rows of one head; returns their share of the sink's gradient.
  double (*rows)(const Spec&, const Call&, const Gradients&, int64_t batch, int64_t head, int64_t begin,
                 int64_t end);
  // A chunk: opened, given tiles of queries one after the other, closed. add_queries adds what the last tile
  // gave to dq.
  void (*open)(const Chunk&);
  void (*tile)(const Chunk&, const Panel* panels, int count);
  void (*add_queries)(const Chunk&, const Panel* panels, int count);
  void (*close)(const Chunk&);
  // From the compute type to the dtype.
  void (*round)(const void* source, void* target, int64_t count);
  // A row that forward has marked; its spans are the panel's, one lane.
  void (*exact_row)(const Task&, const Panel&, const Gradients&);
};

// Few query rows against many keys: splits of the keys, whose parts are put together at the end.
struct DecodeKernels {
  int64_t (*partial_bytes)(const Spec&);
  int64_t (*scratch_bytes)(const Spec&);
  bool (*split)(const Split&);   // false: the table names a page that does not exist
  bool (*finish)(const Split&);  // merges the parts in order and writes the rows' results
};
constexpr int64_t kSplitKeys = 512;

// Facts about the weights of a few panels.
struct EvidenceKernels {
  int64_t (*scratch_bytes)(const Spec&, const Facts&, int panels, bool copy_k);
  void (*look)(const EvidenceTask&);
};

// Tokens of linear attention that meet each other in pairs, and chunks whose states backward computes anew
// from one that forward kept.
constexpr int64_t kLinearChunk = 32;
constexpr int64_t kLinearSegment = 16;

// Forward or backward.
struct LinearKernels {
  int64_t (*scratch_bytes)(const LinearSpec&);
  void (*run)(const LinearTask&);
};

struct WriteKernels {
  void (*rows)(const NewRows&);
};

struct Kernels {
  const char* name;
  int panel_float, panel_double;  // query rows in a panel
  // Arrays, indexed by DType.
  const ForwardKernels* forward;
  const DecodeKernels* decode;
  const BackwardKernels* backward;
  const WriteKernels* write;
  const LinearKernels *linear, *linear_gradients;
  const EvidenceKernels* evidence;
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
