// Evaluates mask programs: finds the spans of keys that a panel of query rows may attend to.
#pragma once
#include <memory>
#include <vector>

#include "types.h"

namespace regard {

// An allocator that leaves new elements uninitialised, because each is written right after a resize.
template <class T>
struct Uninitialized : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = Uninitialized<U>;
  };
  void construct(T*) {}
};
using Spans = std::vector<Span, Uninitialized<Span>>;

// `count` query rows of one head of one sample: row, row + step, ...
struct Rows {
  int64_t batch, head, row, step;
  int count;
};

// Keys [begin, end) of one document, or consecutive global tokens (id 0).
struct Segment {
  int64_t begin, end, id;
};
using Segments = std::vector<Segment>;

// Evaluates a mask program with the tensors of a call. The program, the Spec and the Call are
// referenced, not copied, so they must outlive the SpanFinder.
class SpanFinder {
 public:
  SpanFinder(const std::vector<int64_t>& code, const Spec& spec, const Call& call);

  bool varies_by_batch() const { return by_batch_; }
  bool varies_by_head() const { return by_head_; }
  // Returns the largest known step that divides every distance between positions that the head's mask
  // allows.
  int64_t dilation(int64_t head) const;
  bool dilation_varies() const;
  // Writes the rows' spans, ascending and disjoint. Keys are indexed within the rows' residue class: index n
  // is key first_key(rows) + n * rows.step, so with step 1 an index is a key.
  void find(const Rows& rows, Spans& out) const;
  // Restricts the spans to the indices [begin, end).
  void find(const Rows& rows, int64_t begin, int64_t end, Spans& out) const;
  // Returns the first key of the rows' residue class.
  int64_t first_key(const Rows& rows) const;

 private:
  struct Panel;
  struct OpInfo;
  static const OpInfo kOps[];

  static int64_t dilation_of(const int64_t* node, int64_t head);
  static int64_t step_of_dilated(const int64_t* node, int64_t head);
  static int64_t step_of_head(const int64_t* node, int64_t head);
  static int64_t step_of_cut(const int64_t* node, int64_t head);
  static int64_t step_of_children(const int64_t* node, int64_t head);
  int64_t position(const Rows& rows) const;
  const int64_t* code_of(int64_t head) const;
  void analyze(const int64_t* node);
  void add_segments(const int64_t* node);
  const Segments& segments(const int64_t* node, const Panel& p) const;
  // Each appends the spans of `node` within the indices [lo, hi) to `out`.
  void evaluate(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void window(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void lengths(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void documents(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void prefix(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void global(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void random(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void dilated(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void dense(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void blocks(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void patterns(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void per_head(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void invert(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void cut(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void combine(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;

  const std::vector<int64_t>& code_;
  const Spec& spec_;
  const Call& call_;
  bool by_batch_ = false, by_head_ = false;
  std::vector<const int64_t*> heads_;  // the children if the program's root is PERHEAD
  std::vector<const int64_t*> segment_nodes_;
  std::vector<std::vector<Segments>> segments_;  // [index in segment_nodes_][sample]
};

// The work that a mask causes, summed over all samples and heads.
struct Cost {
  int64_t pairs = 0;                         // (query, key) pairs that the mask allows
  int64_t touched = 0;                       // pairs that kernels compute: keys of spans x width of the panel
  int64_t full = 0, partial = 0, empty = 0;  // (panel, key) pairs: all rows, some rows or no row may attend
};
// Ends early, with a partial result, once stop(context) returns true.
Cost measure(const SpanFinder& finder, const Spec& spec, int panel, bool (*stop)(void*), void* context);

}  // namespace regard
