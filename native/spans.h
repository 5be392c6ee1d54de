// The mask program -> the keys that a panel of query rows sees.
#pragma once
#include <vector>

#include "types.h"

namespace regard {

// Query rows `row`, row + step, ... of one head of one sample.
struct Rows {
  int64_t batch, head, row, step;
  int count;
};

class Spans {
 public:
  Spans(const std::vector<int64_t>& code, const Spec& spec, const Call& call);

  bool varies_by_batch() const { return by_batch_; }
  bool varies_by_head() const { return by_head_; }
  // The largest step that divides every allowed distance of this head.
  int64_t dilation(int64_t head) const;
  bool dilation_varies() const;
  // Ascending, disjoint runs. With step > 1 keys are numbered inside the rows' residue class: first_key, +
  // step, ...
  void find(const Rows& rows, std::vector<Run>& out) const;
  // The same for keys [begin, end) of that numbering alone.
  void find(const Rows& rows, int64_t begin, int64_t end, std::vector<Run>& out) const;
  // The key that is number 0 in the residue class of these rows.
  int64_t first_key(const Rows& rows) const;

 private:
  struct Panel;
  using Runs = std::vector<Run>;
  // Neighbouring keys of one document, for each sample.
  struct Segment {
    int64_t begin, id;
  };

  int64_t position(const Rows& rows) const;
  void inspect(const int64_t* node);
  void segment(const int64_t* node);
  void evaluate(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const;
  void window(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const;
  static void band(const Panel& p, int64_t begin, int64_t end, bool opens, bool closes, Runs& out);
  static void sweep(const Panel& p, int64_t begin, int64_t end, int64_t lo, int64_t hi, Runs& out);
  void documents(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const;
  void global(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const;
  void random(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const;
  void dilated(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const;
  void dense(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const;
  void blocks(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const;
  void combine(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const;

  const std::vector<int64_t>& code_;
  const Spec& spec_;
  const Call& call_;
  bool by_batch_ = false, by_head_ = false;
  std::vector<const int64_t*> document_nodes_;
  std::vector<std::vector<std::vector<Segment>>> segments_;  // [document node][sample]
};

// How much of the rectangle a mask leaves, over all samples and heads.
struct Cost {
  int64_t pairs = 0;                         // (query, key) pairs seen
  int64_t touched = 0;                       // pairs computed: panel width x keys
  int64_t full = 0, partial = 0, empty = 0;  // panel x key
};
Cost measure(const Spans& spans, const Spec& spec, int panel);

}  // namespace regard
