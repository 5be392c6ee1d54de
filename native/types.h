// Plain data that crosses the borders between files: no behaviour, no library types.
#pragma once
#include <stdint.h>

namespace regard {

enum DType : int32_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };
static inline int64_t item_bytes(DType dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }
// How K and V are stored: in the dtype of q, or as codes with scales in float16, kGroup channels sharing one.
enum StoreKind : int32_t {
  kFloats = 0,
  kInt8 = 1,  // x = code * scale; scales (..., groups)
  kInt4 = 2,  // x = code * scale + low; 16 bytes hold a group: byte i has channel i below and i + 16 above;
              // scales and lows (..., groups, 2)
};
enum BiasKind : int32_t { kNoBias = 0, kTensorBias = 1, kAlibi = 2, kRelative = 3 };

constexpr int64_t kGroup = 32;

// Query rows of a panel are lanes of a 32-bit set.
constexpr int kMaxPanel = 32;

// Keys [begin, end) are seen by the panel's rows in `lanes`.
struct Span {
  int64_t begin, end;
  uint32_t lanes;
};

// A tensor of the mask program; core dims are right-aligned in (b, h, q, k), absent or broadcast ones have
// stride 0.
struct MaskTensor {
  const void* data;
  int64_t size[4];
  int64_t stride[4];
};

// Strides are in elements, in the order (B, H, L, D).
struct Strides {
  int64_t b, h, l, d;
};

// What is known from shapes and options alone.
struct Spec {
  DType dtype, bias_dtype;
  BiasKind bias;
  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;
  Strides q, k, v, out;
  Strides bias_stride;       // (B, H, Lq, Lk), 0 where broadcast
  double scale, softcap;     // softcap 0: none
  uint32_t drop_below;       // of 65536; 0: no dropout
  double keep_scale;         // 1 / (1 - p)
  StoreKind store;           // of K and V; their strides count stored elements (bytes of codes)
  Strides k_scale, v_scale;  // (B, H, L) of the scales, in float16 numbers
  int64_t page, pages;       // keys of a page, a power of two, and how many there are; 0: no pages.
                             // Then K's and V's B is the page, and L the row in it.
};

// What a single call adds to its Spec.
struct Call {
  const void *q, *k, *v;
  void* out;
  void* lse;               // (B, Hq, Lq) float or double, or null
  void* stats;             // (2, B, Hq, Lq): each row's shift and sum, which backward starts from; or null.
                           // A negative sum marks a row whose scores leave the compute type.
  void* residual;          // like out: what rounding to 16 bits took from it; or null
  const void* bias;        // tensor bias
  const void* by_head;     // kAlibi: slopes (Hq); kRelative: table (Hq, distances), constant beyond its ends;
                           // float or double like the compute type
  int64_t distance_low;    // kRelative: distance of the table's first column
  int64_t distances;       // kRelative: columns
  const void* sink;        // (Hq) float or double, or null
  const int64_t* offsets;  // (B), or null
  int64_t offset;
  uint64_t seed;
  const MaskTensor* tensors;
  const void *k_scale, *v_scale;  // of quantised keys and values
  const int32_t* table;           // (B, ...): which page holds keys i * page, ...; or null
  int64_t table_stride;
};

// Up to a panel's width of query rows of one head, `row_step` apart, and the keys they see (in the task's
// numbering).
struct Panel {
  int64_t head, row;
  int rows;
  const Span* spans;
  int64_t n_spans;
};

// Panels that walk over the same keys together. Key j of the task is key `key + j * key_step` of the call.
struct Task {
  const Spec* spec;
  const Call* call;
  int64_t batch, kv_head;
  int64_t row_step, key, key_step;
  const Panel* panels;
  int n_panels;
  bool copy_k, copy_v;
  void* scratch;
  bool (*stop)(void*);  // asked between blocks; true ends the task early
  void* stop_context;
};

// Rows of one head that a cache takes in. Strides are in elements, of codes in bytes, of scales in float16.
struct NewRows {
  StoreKind store;
  int64_t count, width;
  const void* source;
  int64_t row_stride, stride;
  void* target;
  int64_t target_stride;
  void* scales;
  int64_t scale_stride;
};

struct SpanList {
  const Span* spans;
  int64_t count;
};

// Keys [begin, end) of one head, for all query rows of its group (lane i of a run is row i of each head).
// Key j of the split is key `key + j * key_step` of the call.
struct Split {
  const Spec* spec;
  const Call* call;
  int64_t batch, kv_head;
  int64_t key, key_step;
  const SpanList* spans;  // what the rows see: a list for each head, or one for all of them
  bool by_head;
  int64_t begin, end;
  const Span* seen;  // the keys among them that any row sees, and few others
  int64_t n_seen;
  void* partial;  // where its result goes: see Decode. In `finish`, the first of n_partials
  int64_t n_partials;
  void* scratch;
};

// What the backward pass adds to its Call. "Compute type" is double for float64 and float for all others.
struct Gradients {
  const void *out,
      *residual;     // the result, with Spec::out's strides, and what rounding took from it (or null)
  const void* dout;  // its gradient
  Strides dout_stride, dk_stride, dv_stride;
  const void* dlse;             // (B, Hq, Lq) compute type, or null
  const void* stats;            // as forward left them
  void* delta;                  // (B, Hq, Lq) compute type, our own
  void* dq;                     // (B, Hq, Lq, D) in the dtype of q, or null
  void* dq_sum;                 // the same in the compute type, to add to: dq itself, or our own
  void *dk, *dv;                // in the dtype of k and v, or null
  void* dbias;                  // with pairs 16 bits as the bias, or compute type; else double; or null
  Strides dbias_stride;         // (B, H, Lq, Lk), 0 where it was broadcast
  double *dk_exact, *dv_exact;  // (B, Hkv, Lk, D or Dv): what marked rows give to keys; or null
  void* dby_head;               // (Hq, 1 or distances) compute type, or null
  void* dsink;                  // (Hq) compute type, or null
};

// Whether the bias's gradient has both rows and keys.
static inline bool bias_has_pairs(const Spec& spec, const Gradients& g) {
  return (g.dbias_stride.l != 0 || spec.Lq == 1) && (g.dbias_stride.d != 0 || spec.Lk == 1);
}

// Whether several pairs add to one element of it.
static inline bool bias_is_shared(const Spec& spec, const Gradients& g) {
  const Strides& s = g.dbias_stride;
  return (s.b == 0 && spec.B > 1) || (s.h == 0 && spec.Hq > 1) || !bias_has_pairs(spec, g);
}

// Keys [begin, end) of one head (in the numbering of their class, like a Task's) and room for the sums of
// their gradients.
struct Chunk {
  const Spec* spec;
  const Call* call;
  const Gradients* grads;
  int64_t batch, kv_head;
  int64_t row_step, key, key_step;
  int64_t begin, end;
  bool copy_k, copy_v;
  bool bias_only;   // the pass that sums a broadcast bias's gradient
  double* by_head;  // (heads of the group, columns): this chunk's share of dby_head; or null
  void* scratch;
};

// Facts about the weights; null or 0: not asked for. Tensors are contiguous, in the compute type unless said
// otherwise, and zeros before the call.
struct Facts {
  int64_t k;                  // the largest weights of each row
  void* top_weights;          // (B, Hq, Lq, k)
  int64_t* top_keys;          // (B, Hq, Lq, k)
  void* nats;                 // (B, Hq, Lq)
  int64_t* choices;           // (B, Hq, Lq): keys that may be attended to, and the sink
  double* column_mass;        // (B, Hq, Lk)
  const void* row_weights;    // (1 or B, Lq): how much a row counts in it; or null
  int64_t row_weights_batch;  // its stride
  double* histogram;          // (B, Hq, distances), from distance_low on
  int64_t distance_low, distances;
  int64_t sets;         // of keys
  const bool* chosen;   // (sets, B, Lk)
  void* mass_on;        // (sets, B, Hq, Lq)
  int64_t block;        // queries and keys of a block
  double* block_mass;   // (B, Hq, blocks of queries, blocks of keys)
  void* block_max;      // the same
  int64_t n_rows;       // whole rows
  const int64_t* rows;  // (n_rows), ascending, each once
  void* row_values;     // (B, Hq, n_rows, Lk)
};

// Whether only whole rows are asked for.
static inline bool only_rows(const Facts& f) {
  return !f.k && !f.nats && !f.column_mass && !f.histogram && !f.sets && !f.block;
}

// Panels of one head, one after the other, of which facts are to be found.
struct EvidenceTask {
  Task task;
  const Facts* facts;
  double *column_mass, *histogram;  // of this head: (Lk), (distances); to be added to
};

// Linear attention: a state S (D, Dv) for each head of K and V, in place of a cache.
struct LinearSpec {
  DType dtype;
  int64_t B, Hq, Hkv, L, D, Dv;
  Strides q, k, v, out;
  double scale;
  bool normalize;
};

// Gates, states and what is kept for backward are contiguous, in the compute type.
struct LinearCall {
  const void *q, *k, *v;
  void* out;
  const void *log_decay, *beta;  // (B, Hkv, L), or null
  const int64_t* lengths;        // (B), or null
  const void *S, *z;             // (B, Hkv, D, Dv) and (B, Hkv, D) before the first token, or null: zeros
  void *S_end, *z_end;           // after the last; z_end null unless normalised
  void *S_kept, *z_kept;         // (B, Hkv, segments, ...): before each segment, for backward; or null
  void* errors;                  // (B, Hkv, L, Dv): v less what the state held of it (delta rule); or null
};

struct LinearGradients {
  const void* dout;
  const void *dS_end, *dz_end;  // or null: zeros
  void *dq, *dk, *dv;           // in the dtype of q
  void *dlog_decay, *dbeta;     // (B, Hkv, L) compute type, or null
  void *dS, *dz;                // of the state before the first token; dz null unless normalised
  Strides dout_stride, dq_stride, dk_stride, dv_stride;
};

// One head of K and V with its query heads, from the first token to the last or back.
struct LinearTask {
  const LinearSpec* spec;
  const LinearCall* call;
  const LinearGradients* grads;  // null in forward
  int64_t batch, kv_head;
  void* scratch;
  bool (*stop)(void*);
  void* stop_context;
};

}  // namespace regard
