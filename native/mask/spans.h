// The mask program -> the keys that a panel of query rows sees.
#pragma once
#include <memory>
#include <vector>

#include "types.h"

namespace regard {

// Leaves new elements unset: a vector would fill them with zeros just before they are written.
template <class T>
struct Unset : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = Unset<U>;
  };
  void construct(T*) {}
};
using Spans = std::vector<Span, Unset<Span>>;

// Query rows `row`, row + step, ... of one head of one sample.
struct Rows {
  int64_t batch, head, row, step;
  int count;
};

// Neighbouring keys of one document, or neighbouring global tokens.
struct Segment {
  int64_t begin, end, id;
};
using Segments = std::vector<Segment>;

class SpanFinder {
 public:
  SpanFinder(const std::vector<int64_t>& code, const Spec& spec, const Call& call);

  bool varies_by_batch() const { return by_batch_; }
  bool varies_by_head() const { return by_head_; }
  // The largest step that divides every allowed distance of this head.
  int64_t dilation(int64_t head) const;
  bool dilation_varies() const;
  // Ascending, disjoint spans. With step > 1 keys are numbered inside the rows' residue class: first_key, +
  // step, ...
  void find(const Rows& rows, Spans& out) const;
  // The same for keys [begin, end) of that numbering alone.
  void find(const Rows& rows, int64_t begin, int64_t end, Spans& out) const;
  // The key that is number 0 in the residue class of these rows.
  int64_t first_key(const Rows& rows) const;

 private:
  struct Panel;
  struct Atom;
  static const Atom kAtoms[];

  static int64_t dilation_of(const int64_t* node, int64_t head);
  static int64_t own_step(const int64_t* node, int64_t head);
  static int64_t step_of_head(const int64_t* node, int64_t head);
  static int64_t step_of_children(const int64_t* node, int64_t head);
  int64_t position(const Rows& rows) const;
  const int64_t* code_of(int64_t head) const;
  void inspect(const int64_t* node);
  void segment(const int64_t* node);
  const Segments& segments(const int64_t* node, const Panel& p) const;
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
  void per_head(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void invert(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  void combine(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;

  const std::vector<int64_t>& code_;
  const Spec& spec_;
  const Call& call_;
  bool by_batch_ = false, by_head_ = false;
  std::vector<const int64_t*> heads_;  // where the program is one PERHEAD, its children
  std::vector<const int64_t*> segmented_;
  std::vector<std::vector<Segments>> segments_;  // [node of segmented_][sample]
};

// How much of the rectangle a mask leaves, over all samples and heads.
struct Cost {
  int64_t pairs = 0;                         // (query, key) pairs seen
  int64_t touched = 0;                       // pairs computed: panel width x keys
  int64_t full = 0, partial = 0, empty = 0;  // panel x key
};
Cost measure(const SpanFinder& spans, const Spec& spec, int panel);

}  // namespace regard
