// The function tables through which the rest of the core calls the kernels of an instruction set.
#pragma once
#include "types.h"

namespace regard {

// Backward: the number of panels in a tile of queries, and of keys in a block of a chunk.
constexpr int kTilePanels = 4;
constexpr int64_t kBackwardBlock = 96;

struct ForwardKernels {
  int64_t (*scratch_bytes)(const Spec&, int panels, bool copy_k, bool copy_v);
  void (*run)(const Task&);
};

struct BackwardKernels {
  int64_t (*scratch_bytes)(const Spec&, const Gradients&, int64_t keys, bool copy_k, bool copy_v);
  // Computes delta for rows [begin, end) of one head. Returns their part of the sink's gradient.
  double (*rows)(const Spec&, const Call&, const Gradients&, int64_t batch, int64_t head, int64_t begin,
                 int64_t end);
  // One chunk of keys: `open`, then `tile` for each tile of queries, then `close`. `add_queries`
  // adds the query gradients of the last tile to dq.
  void (*open)(const Chunk&);
  void (*tile)(const Chunk&, const Panel* panels, int count);
  void (*add_queries)(const Chunk&, const Panel* panels, int count);
  void (*close)(const Chunk&);
  // Rounds from the compute type to the dtype.
  void (*round)(const void* source, void* target, int64_t count);
  // Adds the gradients of one row that forward marked (negative sum). The panel has one lane and
  // the row's spans.
  void (*exact_row)(const Task&, const Panel&, const Gradients&);
};

// Few query rows, many keys: `run` computes the partial results of a run's splits, `finish` merges
// the partial results of all splits of a key head.
struct DecodeKernels {
  int64_t (*partial_bytes)(const Spec&);
  int64_t (*max_splits)(const Spec&);  // of a run
  int64_t (*scratch_bytes)(const Spec&, int64_t splits);
  bool (*run)(const Run&);     // false: the page table names a page that does not exist
  bool (*finish)(const Run&);  // merges the partial results in order and writes the output rows
};
constexpr int64_t kSplitKeys = 512;

// Facts about the attention weights of a few panels.
struct EvidenceKernels {
  int64_t (*scratch_bytes)(const Spec&, const Facts&, int panels, bool copy_k);
  void (*run)(const EvidenceTask&);
};

// Linear attention: the number of tokens in a chunk, and of chunks in a segment. Forward saves the
// state before each segment; backward recomputes the states before the other chunks.
constexpr int64_t kLinearChunk = 32;
constexpr int64_t kLinearSegment = 16;

// One table for forward, one for backward.
struct LinearKernels {
  int64_t (*scratch_bytes)(const LinearSpec&);
  void (*run)(const LinearTask&);
};

struct WriteKernels {
  void (*rows)(const NewRows&);
};

// Linear layers with few rows.
struct ProjectionKernels {
  int64_t (*packed_bytes)(const Projection&);
  void (*pack)(const Projection&, void* packed);  // converts x to the compute type
  // Computes columns [begin, end) of the output.
  void (*run)(const Projection&, const void* packed, int64_t begin, int64_t end);
};

struct Kernels {
  const char* name;
  int panel_float, panel_double;  // query rows of a panel
  bool pairs;                     // attention and evidence multiply bfloat16 numbers in pairs
  // Indexed by DType.
  const ForwardKernels* forward[4];
  const DecodeKernels* decode[4];
  const BackwardKernels* backward[4];
  const WriteKernels* write[4];
  const LinearKernels *linear[4], *linear_gradients[4];
  const EvidenceKernels* evidence[4];
  const ProjectionKernels* projection[4];
  // Machine probes: return the floating point operations done, in float and in the products of
  // bfloat16 numbers, and a checksum of the bytes read.
  double (*fma_probe)(int64_t rounds);
  double (*bfloat16_probe)(int64_t rounds);
  double (*read_probe)(const float* data, int64_t count);
};

}  // namespace regard

extern "C" {
extern const regard::Kernels regard_kernels_generic;
extern const regard::Kernels regard_kernels_wide;
extern const regard::Kernels regard_kernels_avx2;
extern const regard::Kernels regard_kernels_avx512;
extern const regard::Kernels regard_kernels_avx512bf16;
}
