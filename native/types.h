// Structs and enums that the bindings, the passes and the kernels share. Data only: no member functions and
// no library types, because kernels are compiled once for each instruction set.
#pragma once
#include <stdint.h>

namespace regard {

// The "compute type" in the comments below is double for float64 and float for all other dtypes.
enum DType : int32_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };
static inline int64_t item_bytes(DType dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }
// Storage of K and V: in q's dtype, or quantised in groups of kGroup channels with float16 scales.
enum StoreKind : int32_t {
  kFloats = 0,
  kInt8 = 1,  // x = code * scale; scales (..., groups)
  kInt4 = 2,  // x = code * scale + low; scales and lows (..., groups, 2). A group takes 16 bytes: byte i
              // holds channel i in its low 4 bits and channel i + 16 in its high 4 bits.
};
enum BiasKind : int32_t { kNoBias = 0, kTensorBias = 1, kAlibi = 2, kRelative = 3 };

constexpr int64_t kGroup = 32;

// The largest number of query rows in a panel: a 32-bit set holds one bit (lane) per row.
constexpr int kMaxPanel = 32;

// Keys [begin, end) and the set of panel rows that may attend to them: bit i of `lanes` is row i.
struct Span {
  int64_t begin, end;
  uint32_t lanes;
};

// A tensor of the mask program, as (B, H, Lq, Lk). Dims that are absent or broadcast have stride 0.
struct MaskTensor {
  const void* data;
  int64_t size[4];
  int64_t stride[4];
};

// Strides in elements, in the order (B, H, L, D).
struct Strides {
  int64_t b, h, l, d;
};

// The part of a call that follows from shapes and options. It can be reused for other data.
struct Spec {
  DType dtype, bias_dtype;
  BiasKind bias;
  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;
  Strides q, k, v, out;
  Strides bias_stride;       // (B, H, Lq, Lk); 0 for broadcast dims
  double scale, softcap;     // softcap 0: no cap
  uint32_t drop_below;       // dropout probability p * 65536; 0: no dropout
  double keep_scale;         // 1 / (1 - p)
  StoreKind store;           // of K and V. For quantised K and V, the strides above are in bytes
  Strides k_scale, v_scale;  // strides (B, H, L) of the scales, in float16 elements
  int64_t page, pages;       // keys per page (a power of two) and number of pages; 0: not paged. In paged
                             // storage, K's and V's dim B is the page and dim L is the row within the page.
};

// Where a call lies in a larger one whose dropout pattern it draws: the weight of sample b, head h, query i
// and key j has the random number of head index head + b * heads + h, query query + i and key key + j.
struct DropoutOrigin {
  int64_t head, heads;  // heads 0: Spec::Hq
  int64_t query, key;
};

// The data of one call: pointers, offset and seed.
struct Call {
  const void *q, *k, *v;
  void* out;
  void* lse;             // (B, Hq, Lq) compute type, or null
  void* stats;           // (2, B, Hq, Lq) compute type: each row's shift, then its softmax sum, for backward;
                         // or null. A negative sum marks an exact row: its scores overflow the compute type,
                         // so it is computed in double precision, one row at a time.
  void* residual;        // like out: the rounding error of a 16-bit output; or null
  const void* bias;      // kTensorBias
  const void* by_head;   // compute type. kAlibi: slopes (Hq); kRelative: table (Hq, distances), whose first
                         // and last columns also serve all distances beyond them
  int64_t distance_low;  // kRelative: distance of the table's first column
  int64_t distances;     // kRelative: number of columns
  const void* sink;      // (Hq) compute type, or null
  const int64_t* offsets;  // (B): offset of each sample; or null
  int64_t offset;          // of all samples if `offsets` is null
  uint64_t seed;           // of dropout
  DropoutOrigin origin;
  const MaskTensor* tensors;
  const void *k_scale, *v_scale;  // scales of quantised K and V
  const int32_t* table;           // (B, ...): entry i is the page that holds keys [i * page, (i + 1) * page);
                                  // or null
  int64_t table_stride;
};

// Query rows row, row + row_step, ... of one head, up to a panel's width, and their spans. Keys in spans are
// numbered as in the Task.
struct Panel {
  int64_t head, row;
  int rows;
  const Span* spans;
  int64_t n_spans;
};

// Panels that share one pass over the keys of a key head. Key j of the task is key `key + j * key_step` of
// the call.
struct Task {
  const Spec* spec;
  const Call* call;
  int64_t batch, kv_head;
  int64_t row_step, key, key_step;
  const Panel* panels;
  int n_panels;
  bool copy_k, copy_v;  // copy each key block to scratch before use (contiguous, in the compute type)
  void* scratch;
  bool (*stop)(void*);  // called between key blocks; the task ends early if it returns true
  void* stop_context;
};

// New rows of one head, to be written to a cache's storage. Strides are in elements, target_stride in bytes
// if the storage is quantised, scale_stride in float16 elements.
struct NewRows {
  StoreKind store;
  int64_t count, width;  // rows, channels
  const void* source;
  int64_t row_stride, stride;  // of the source: from row to row, from channel to channel
  void* target;
  int64_t target_stride;
  void* scales;
  int64_t scale_stride;
};

struct SpanList {
  const Span* spans;
  int64_t count;
};

// Keys [begin, end). `any_row` is the union of Run::spans over rows and heads, with short gaps closed, as far
// as it overlaps these keys; `lanes` is not used.
struct Split {
  int64_t begin, end;
  const Span* any_row;
  int64_t n_any_row;
};

// Consecutive splits of one key head, for all query rows of the heads that share it. Lane i of a span is row
// i of a head. Key j of the run is key `key + j * key_step` of the call.
struct Run {
  const Spec* spec;
  const Call* call;
  int64_t batch, kv_head;
  int64_t key, key_step;
  const SpanList* spans;  // if by_head, one list for each of these heads; otherwise one list for all
  bool by_head;
  const Split* splits;
  int64_t n_splits;
  void* partials;  // the splits' partial results
  void* scratch;
};

// The inputs and outputs that backward adds to its Call.
struct Gradients {
  const void *out, *residual;  // forward's results, with the strides Spec::out; residual may be null
  const void* dout;
  Strides dout_stride, dk_stride, dv_stride;
  const void* dlse;      // (B, Hq, Lq) compute type, or null
  const void* stats;     // Call::stats as forward wrote them
  void* delta;           // (B, Hq, Lq) compute type: a buffer that the pass allocates
  void* dq;              // (B, Hq, Lq, D) in q's dtype, or null
  void* dq_sum;          // (B, Hq, Lq, D) compute type: sums of dq. It is dq itself, or for a 16-bit dq a
                         // buffer that the pass allocates
  void *dk, *dv;         // in the dtype of k and v, or null
  void* dbias;           // or null. If the bias has a row and a key dim: in the bias's dtype if that has
                         // 16 bits, otherwise in the compute type. For all other biases: double
  Strides dbias_stride;  // (B, H, Lq, Lk); 0 for broadcast dims
  double *dk_exact, *dv_exact;  // (B, Hkv, Lk, D or Dv): the exact rows' share of dk and dv; or null
  void* dby_head;               // (Hq, 1 or distances) compute type, or null
  void* dsink;                  // (Hq) compute type, or null
};

// Returns whether the bias's gradient has one element for each (query, key) pair.
static inline bool bias_has_pairs(const Spec& spec, const Gradients& g) {
  return (g.dbias_stride.l != 0 || spec.Lq == 1) && (g.dbias_stride.d != 0 || spec.Lk == 1);
}

// Returns whether an element of the bias's gradient sums several scores, because the bias is broadcast.
static inline bool bias_is_shared(const Spec& spec, const Gradients& g) {
  const Strides& s = g.dbias_stride;
  return (s.b == 0 && spec.B > 1) || (s.h == 0 && spec.Hq > 1) || !bias_has_pairs(spec, g);
}

// Keys [begin, end) of one key head in backward, numbered within their residue class as in a Task.
// `scratch` holds the sums of dk and dv of these keys.
struct Chunk {
  const Spec* spec;
  const Call* call;
  const Gradients* grads;
  int64_t batch, kv_head;
  int64_t row_step, key, key_step;
  int64_t begin, end;
  bool copy_k, copy_v;
  bool bias_only;   // compute only the gradient of a broadcast bias
  double* by_head;  // (heads of the group, columns): the chunk's share of dby_head; or null
  void* scratch;
};

// Output buffers of evidence. Null or 0: not requested. Tensors are contiguous and zero before the call, in
// the compute type unless declared otherwise.
struct Facts {
  int64_t k;                  // number of top weights per row
  void* top_weights;          // (B, Hq, Lq, k)
  int64_t* top_keys;          // (B, Hq, Lq, k)
  void* nats;                 // (B, Hq, Lq): entropy
  int64_t* choices;           // (B, Hq, Lq): number of keys that the row may attend to, plus 1 with a sink
  double* column_mass;        // (B, Hq, Lk)
  const void* row_weights;    // (1 or B, Lq): each row's factor in column_mass; or null
  int64_t row_weights_batch;  // batch stride of row_weights
  double* histogram;          // (B, Hq, distances): mass by distance; column 0 is distance_low
  int64_t distance_low, distances;
  int64_t sets;         // number of key sets
  const bool* chosen;   // (sets, B, Lk): membership
  void* mass_on;        // (sets, B, Hq, Lq): each row's mass on each set
  int64_t block;        // side length of a block: `block` queries by `block` keys
  double* block_mass;   // (B, Hq, query blocks, key blocks)
  void* block_max;      // (B, Hq, query blocks, key blocks)
  int64_t n_rows;       // number of rows whose weights are returned in full
  const int64_t* rows;  // (n_rows), strictly ascending
  void* row_values;     // (B, Hq, n_rows, Lk)
};

// Returns whether no fact but whole rows (`row_values`) is requested.
static inline bool only_rows(const Facts& f) {
  return !f.k && !f.nats && !f.column_mass && !f.histogram && !f.sets && !f.block;
}

// Panels of one head, in ascending order, whose facts are computed.
struct EvidenceTask {
  Task task;
  const Facts* facts;
  double *column_mass, *histogram;  // (Lk), (distances): sums that the kernel adds to
};

// Linear attention. Each key head has a state S (D, Dv).
struct LinearSpec {
  DType dtype;
  int64_t B, Hq, Hkv, L, D, Dv;
  Strides q, k, v, out;
  double scale;
  bool normalize;
};

// Gates, states and `errors` are contiguous, in the compute type.
struct LinearCall {
  const void *q, *k, *v;
  void* out;
  const void *log_decay, *beta;  // (B, Hkv, L), or null
  const int64_t* lengths;        // (B), or null
  const void *S, *z;             // (B, Hkv, D, Dv) and (B, Hkv, D): state before the first token; null: zeros
  void *S_end, *z_end;           // state after the last token; z_end is null unless normalised
  void *S_kept, *z_kept;         // (B, Hkv, segments, ...): state before each segment, for backward; or null
  void* errors;  // (B, Hkv, L, Dv): delta rule's errors, v minus the state's prediction; or null
};

struct LinearGradients {
  const void* dout;
  const void *dS_end, *dz_end;  // null: zeros
  void *dq, *dk, *dv;           // in q's dtype
  void *dlog_decay, *dbeta;     // (B, Hkv, L) compute type, or null
  void *dS, *dz;                // of the state before the first token; dz is null unless normalised
  Strides dout_stride, dq_stride, dk_stride, dv_stride;
};

// All tokens of one key head and its query heads. Forward goes from the first token to the last, backward
// from the last to the first.
struct LinearTask {
  const LinearSpec* spec;
  const LinearCall* call;
  const LinearGradients* grads;  // null in forward
  int64_t batch, kv_head;
  void* scratch;
  bool (*stop)(void*);  // as in Task
  void* stop_context;
};

// out = x W^T + bias, for few rows of x. Strides are in elements.
struct Projection {
  DType dtype;
  int64_t rows, depth, width;  // rows of x and out; columns of x and W; rows of W, columns of out
  const void* x;
  int64_t x_row, x_column;
  const void* weight;  // (width, depth), its columns contiguous
  int64_t weight_row;
  const void* bias;  // (width) contiguous, or null
  void* out;         // (rows, width) contiguous
};

}  // namespace regard
