#include "mask/spans.h"

#include <string.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

namespace regard {
namespace {

// The same codes as regard.masks._program.Op. A node is [op, length, arguments..., children...];
// `length` is the number of words of the whole node.
enum Op : int64_t {
  kWindow = 1,
  kLengths,
  kDocuments,
  kTokens,
  kPrefix,
  kGlobal,
  kRandom,
  kDilated,
  kDense,
  kBlocks,
  kPatterns,
  kPerHead,
  kAnd,
  kOr,
  kNot,
  kCut
};

constexpr int64_t kUnlimited = int64_t{1} << 62;
constexpr int64_t kCutArguments = 6;  // arguments of CUT, in front of its child
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

uint32_t first_lanes(int n) { return n >= 32 ? ~0u : (1u << n) - 1; }

int64_t floor_div(int64_t a, int64_t b) {
  return b == 1 ? a : a / b - (a % b != 0 && (a < 0) != (b < 0));  // b is mostly 1, and a division is slow
}
int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }
int64_t modulo(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

// Appends a span. Extends the last span instead if the two touch and have the same lanes.
void append(Spans& out, int64_t begin, int64_t end, uint32_t lanes) {
  if (begin >= end || lanes == 0) return;
  if (!out.empty() && out.back().end == begin && out.back().lanes == lanes)
    out.back().end = end;
  else
    out.push_back({begin, end, lanes});
}

// The span lists of a node's children lie one after the other in one vector, like operands on a stack, so
// that combining them allocates nothing. A sentinel after all keys separates two lists.
constexpr int64_t kAfterAll = std::numeric_limits<int64_t>::max();
constexpr Span kSentinel = {kAfterAll, kAfterAll, 0};

// Starts a new list after the one that begins at `last` and returns its begin. Replaces an empty last list.
size_t begin_list(Spans& out, size_t last) {
  if (out.size() > last) out.push_back(kSentinel);
  return out.size();
}

// Returns whether the last list, which begins at a, is one full span [lo, hi).
bool is_full(const Spans& out, size_t a, int64_t lo, int64_t hi, uint32_t all) {
  return out.size() == a + 1 && out[a].begin == lo && out[a].end == hi && out[a].lanes == all;
}

// Merges the last two lists, which begin at a and b. Each key gets the lanes join(lanes in a, lanes in b).
template <class Join>
void merge(Spans& out, size_t a, size_t b, Join join) {
  out.push_back(kSentinel);
  const size_t top = out.size();
  out.resize(top + 2 * (top - a));  // room for one span per span boundary, which is enough
  const Span *x = &out[a], *y = &out[b];
  Span* last = &out[top - 1];
  for (int64_t key = 0; (key = std::max(key, std::min(x->begin, y->begin))) < kAfterAll;) {
    const bool in_x = x->begin <= key, in_y = y->begin <= key;
    const int64_t stop = std::min(in_x ? x->end : x->begin, in_y ? y->end : y->begin);
    const uint32_t lanes = join(in_x ? x->lanes : 0, in_y ? y->lanes : 0);
    if (last->end == key && last->lanes == lanes)
      last->end = stop;
    else if (lanes)
      *++last = {key, stop, lanes};
    x += x->end == stop;
    y += y->end == stop;
    key = stop;
  }
  out.resize(last + 1 - out.data());
  out.erase(out.begin() + a, out.begin() + top);
}

// Appends the spans of a panel's windows. With `opens`, the first key of row t is begin + t;
// otherwise all rows start at `begin`. With `closes`, the end of row t is end + t; otherwise all
// rows end at `end`. Between these edges one full span covers all rows.
void band(int rows, int64_t begin, int64_t end, bool opens, bool closes, Spans& out) {
  const int edges = rows - 1;
  const uint32_t all = first_lanes(rows);
  const size_t size = out.size();
  out.resize(size + (opens ? edges : 0) + 1 + (closes ? edges : 0));
  Span* span = &out[size];
  for (uint32_t lanes = 1; opens && lanes != all; lanes = lanes << 1 | 1, ++begin)
    *span++ = {begin, begin + 1, lanes};
  *span++ = {begin, end, all};
  for (uint32_t lanes = all; closes && (lanes = lanes << 1 & all); ++end) *span++ = {end, end + 1, lanes};
}

// Like `band` for windows [begin + t, end + t), but for a panel in which [lo, hi) clips the windows
// of some rows and not of others.
void sweep(int rows, int64_t begin, int64_t end, int64_t lo, int64_t hi, Spans& out) {
  int opened = 0, closed = 0;
  for (int64_t key = lo; key < hi;) {
    while (opened < rows && begin + opened <= key) ++opened;
    while (closed < opened && end + closed <= key) ++closed;
    if (closed == rows) return;
    int64_t stop = closed < opened ? std::min(hi, end + closed) : hi;
    if (opened < rows) stop = std::min(stop, begin + opened);
    const uint32_t lanes = first_lanes(opened) & ~first_lanes(closed);
    if (lanes) out.push_back({key, stop, lanes});
    key = stop;
  }
}

// Adds a key with this id to the segments. The key must be larger than all keys so far.
void extend(Segments& segments, int64_t key, int64_t id) {
  if (!segments.empty() && segments.back().end == key && segments.back().id == id)
    segments.back().end = key + 1;
  else
    segments.push_back({key, key + 1, id});
}

// Returns the first segment that ends after `key`.
Segments::const_iterator first_after(const Segments& segments, int64_t key) {
  return std::upper_bound(segments.begin(), segments.end(), key,
                          [](int64_t k, const Segment& s) { return k < s.end; });
}

// The finaliser of splitmix64.
uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// Returns the key blocks that the queries of block r attend to, ascending.
std::vector<int64_t> random_blocks(int64_t per_row, uint64_t seed, int64_t r, int64_t blocks) {
  std::vector<int64_t> chosen;
  chosen.reserve(std::min(per_row, blocks));
  if (per_row >= blocks) {
    chosen.resize(blocks);
    std::iota(chosen.begin(), chosen.end(), int64_t{0});
    return chosen;
  }
  const uint64_t row = mix(seed + kGolden * (static_cast<uint64_t>(r) + 1));
  for (uint64_t i = 0; static_cast<int64_t>(chosen.size()) < per_row; ++i) {
    const int64_t block = static_cast<int64_t>(mix(row + kGolden * (i + 1)) % static_cast<uint64_t>(blocks));
    const auto next = std::lower_bound(chosen.begin(), chosen.end(), block);
    if (next == chosen.end() || *next != block) chosen.insert(next, block);
  }
  return chosen;
}

// Appends the spans of the keys [lo, hi). Row t may attend to `key` if row[t][(key - lo) * stride] is 1.
void read_rows(const uint8_t* const* row, int rows, int64_t stride, int64_t lo, int64_t hi, Spans& out) {
  const uint32_t every_row = first_lanes(rows);
  for (int64_t key = lo; key < hi;) {
    if (stride == 1 && key + 8 <= hi) {
      uint64_t any = 0, all = ~uint64_t{0};
      for (int t = 0; t < rows; ++t) {
        uint64_t eight;
        memcpy(&eight, row[t] + (key - lo), 8);
        any |= eight;
        all &= eight;
      }
      if (any == 0 || all == 0x0101010101010101u) {
        append(out, key, key + 8, any ? every_row : 0);
        key += 8;
        continue;
      }
    }
    const int64_t stop = std::min(hi, key + 8);
    for (; key < stop; ++key) {
      uint32_t lanes = 0;
      for (int t = 0; t < rows; ++t) lanes |= static_cast<uint32_t>(row[t][(key - lo) * stride] != 0) << t;
      append(out, key, key + 1, lanes);
    }
  }
}

// Returns the first child of a combination.
const int64_t* first_child(const int64_t* node) { return node + 2 + (node[0] == kCut ? kCutArguments : 0); }

// Returns the n-th child of a combination.
const int64_t* child_of(const int64_t* node, int64_t n) {
  const int64_t* child = first_child(node);
  while (n-- > 0) child += child[1];
  return child;
}

// Larger dilations are ignored: residue classes would hold few keys, and products of steps could overflow.
constexpr int64_t kMaxStep = int64_t{1} << 31;

template <class T>
const T* element(const MaskTensor& t, int64_t b, int64_t h, int64_t q, int64_t k) {
  return static_cast<const T*>(t.data) + b * t.stride[0] + h * t.stride[1] + q * t.stride[2] +
         k * t.stride[3];
}

}  // namespace

// The rows of a panel, and the indices of keys in their residue class: index n is key first_key + n * step.
struct SpanFinder::Panel {
  const Rows& rows;
  int64_t position;             // of the first row
  int64_t first_key, diagonal;  // diagonal: the index of the key at `position`
  uint32_t all;                 // the lanes of all rows
  int64_t Lk;                   // keys of the call, or inside CUT of the call that the mask was cut from

  // Returns the position of row t.
  int64_t query(int t) const { return position + t * rows.step; }
  int64_t key(int64_t index) const { return first_key + index * rows.step; }
  // Returns the index of the first key of the class that is >= key.
  int64_t index(int64_t key) const { return ceil_div(key - first_key, rows.step); }
};

SpanFinder::SpanFinder(const std::vector<int64_t>& code, const Spec& spec, const Call& call)
    : code_(code), spec_(spec), call_(call) {
  if (code.empty()) return;
  by_batch_ = call.offsets != nullptr;
  analyze(code.data());
  if (code[0] != kPerHead) return;
  for (const int64_t* child = &code[2]; child < &code[0] + code[1]; child += child[1])
    heads_.push_back(child);
}

const int64_t* SpanFinder::code_of(int64_t head) const {
  return heads_.empty() ? code_.data() : heads_[head];
}

// How an op is evaluated.
struct SpanFinder::OpInfo {
  void (SpanFinder::*find)(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  int tensors = 0;     // how many arguments, from the first one on, are indices of tensors (b, h, ...)
  int segmented = -1;  // which of these tensors is converted to Segments; -1: none
  int64_t (*dilation)(const int64_t* node, int64_t head) = nullptr;  // null: the dilation is 1
};

// Indexed by Op.
const SpanFinder::OpInfo SpanFinder::kOps[] = {
    {},                                               // no op has number 0
    {&SpanFinder::window},                            // kWindow
    {&SpanFinder::lengths, 1},                        // kLengths
    {&SpanFinder::documents, 2, 1},                   // kDocuments
    {&SpanFinder::documents, 1, 0},                   // kTokens
    {&SpanFinder::prefix},                            // kPrefix
    {&SpanFinder::global, 1, 0},                      // kGlobal
    {&SpanFinder::random},                            // kRandom
    {&SpanFinder::dilated, 0, -1, step_of_dilated},   // kDilated
    {&SpanFinder::dense, 1},                          // kDense
    {&SpanFinder::blocks, 1},                         // kBlocks
    {&SpanFinder::patterns, 1},                       // kPatterns: the patterns depend on no sample or head
    {&SpanFinder::per_head, 0, -1, step_of_head},     // kPerHead
    {&SpanFinder::combine, 0, -1, step_of_children},  // kAnd
    {&SpanFinder::combine, 0, -1, step_of_children},  // kOr
    {&SpanFinder::invert},                            // kNot
    {&SpanFinder::cut, 0, -1, step_of_cut},           // kCut
};

int64_t SpanFinder::step_of_dilated(const int64_t* node, int64_t) { return node[2] < kMaxStep ? node[2] : 1; }

int64_t SpanFinder::step_of_cut(const int64_t* node, int64_t head) {
  return dilation_of(first_child(node), head + node[2]);
}

int64_t SpanFinder::step_of_head(const int64_t* node, int64_t head) {
  return dilation_of(child_of(node, head), head);
}

// Returns the dilation of a node, or 1 if it is unknown.
int64_t SpanFinder::dilation_of(const int64_t* node, int64_t head) {
  const OpInfo& op = kOps[node[0]];
  return op.dilation ? op.dilation(node, head) : 1;
}

int64_t SpanFinder::step_of_children(const int64_t* node, int64_t head) {
  int64_t step = dilation_of(node + 2, head);
  for (const int64_t* child = child_of(node, 1); child < node + node[1]; child += child[1]) {
    const int64_t child_step = dilation_of(child, head);
    // Both steps are below 2^31, so the lcm does not overflow.
    step = node[0] == kAnd ? std::lcm(step, child_step) : std::gcd(step, child_step);
    if (step >= kMaxStep) step = 1;
  }
  return step;
}

// Records whether the node and its descendants depend on the sample or the head, and builds their segments.
void SpanFinder::analyze(const int64_t* node) {
  const OpInfo& op = kOps[node[0]];
  for (int i = 0; i < op.tensors; ++i) {
    const MaskTensor& t = call_.tensors[node[2 + i]];
    by_batch_ |= t.size[0] > 1;
    by_head_ |= t.size[1] > 1;
  }
  if (op.segmented >= 0) add_segments(node);
  by_head_ |= node[0] == kPerHead;
  if (node[0] < kPerHead) return;
  for (const int64_t* child = first_child(node); child < node + node[1]; child += child[1]) analyze(child);
}

void SpanFinder::add_segments(const int64_t* node) {
  const MaskTensor& t = call_.tensors[node[2 + kOps[node[0]].segmented]];
  std::vector<Segments> samples(t.size[0]);
  for (int64_t b = 0; b < t.size[0]; ++b)
    for (int64_t i = 0; i < t.size[3]; ++i) {
      const int64_t value = *element<int64_t>(t, b, 0, 0, i);
      if (node[0] != kGlobal)
        extend(samples[b], i, value);
      else if (value >= 0 && value < kUnlimited)
        extend(samples[b], value, 0);
    }
  segment_nodes_.push_back(node);
  segments_.push_back(std::move(samples));
}

const Segments& SpanFinder::segments(const int64_t* node, const Panel& p) const {
  const size_t index = std::find(segment_nodes_.begin(), segment_nodes_.end(), node) - segment_nodes_.begin();
  const std::vector<Segments>& samples = segments_[index];
  return samples[samples.size() > 1 ? p.rows.batch : 0];
}

int64_t SpanFinder::dilation(int64_t head) const {
  return code_.empty() ? 1 : dilation_of(code_of(head), head);
}

bool SpanFinder::dilation_varies() const {
  for (int64_t h = 1; h < spec_.Hq; ++h)
    if (dilation(h) != dilation(0)) return true;
  return false;
}

int64_t SpanFinder::position(const Rows& rows) const {
  return (call_.offsets ? call_.offsets[rows.batch] : call_.offset) + rows.row;
}

int64_t SpanFinder::first_key(const Rows& rows) const { return modulo(position(rows), rows.step); }

void SpanFinder::find(const Rows& rows, Spans& out) const { find(rows, 0, spec_.Lk, out); }

void SpanFinder::find(const Rows& rows, int64_t begin, int64_t end, Spans& out) const {
  const int64_t row_0 = position(rows), diagonal = floor_div(row_0, rows.step);
  const Panel p{rows, row_0, row_0 - diagonal * rows.step, diagonal, first_lanes(rows.count), spec_.Lk};
  end = std::min(end, p.index(spec_.Lk));
  out.clear();
  if (code_.empty())
    append(out, begin, end, p.all);
  else if (begin < end)
    evaluate(code_of(rows.head), p, begin, end, out);
}

void SpanFinder::evaluate(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  (this->*kOps[node[0]].find)(node, p, lo, hi, out);
}

void SpanFinder::window(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const int64_t begin = node[2] == kUnlimited ? -kUnlimited : p.diagonal - floor_div(node[2], p.rows.step);
  const int64_t end = node[3] == kUnlimited ? kUnlimited : p.diagonal + floor_div(node[3], p.rows.step) + 1;
  const int64_t last = p.rows.count - 1;
  const bool opens = begin >= lo, closes = end + last <= hi;
  if ((opens || begin + last <= lo) && (closes || end >= hi) && begin + last < std::min(end, hi) && end > lo)
    band(p.rows.count, opens ? begin : lo, closes ? end : hi, opens, closes, out);
  else
    sweep(p.rows.count, begin, end, lo, hi, out);
}

void SpanFinder::lengths(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const MaskTensor& n = call_.tensors[node[2]];
  append(out, lo, std::min(hi, p.index(*element<int64_t>(n, p.rows.batch, 0, 0, 0))), p.all);
}

void SpanFinder::prefix(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  append(out, lo, std::min(hi, p.index(node[2])), p.all);
}

void SpanFinder::documents(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const MaskTensor& ids = call_.tensors[node[2]];
  int64_t row_id[kMaxPanel];
  uint32_t has_id = 0;  // with kTokens, a row whose position is no key has no id
  for (int t = 0; t < p.rows.count; ++t) {
    const int64_t i = node[0] == kTokens ? p.query(t) : p.rows.row + t * p.rows.step;
    if (node[0] == kTokens && (i < 0 || i >= p.Lk)) continue;
    row_id[t] = *element<int64_t>(ids, p.rows.batch, 0, 0, i);
    has_id |= 1u << t;
  }
  const Segments& keys = segments(node, p);
  for (auto s = first_after(keys, p.key(lo)); s != keys.end() && p.index(s->begin) < hi; ++s) {
    uint32_t lanes = 0;
    for (int t = 0; t < p.rows.count; ++t) lanes |= (has_id >> t & 1) && row_id[t] == s->id ? 1u << t : 0;
    append(out, std::max(lo, p.index(s->begin)), std::min(hi, p.index(s->end)), lanes);
  }
}

void SpanFinder::global(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const Segments& tokens = segments(node, p);
  const auto lane = [&](int64_t position) {
    return std::clamp<int64_t>(p.index(position) - p.diagonal, 0, p.rows.count);
  };
  uint32_t global_rows = 0;  // rows at the position of a global token: they attend to all keys
  for (auto s = first_after(tokens, p.position); s != tokens.end() && lane(s->begin) < p.rows.count; ++s)
    global_rows |= first_lanes(lane(s->end)) & ~first_lanes(lane(s->begin));
  for (auto s = first_after(tokens, p.key(lo)); s != tokens.end() && p.index(s->begin) < hi; ++s) {
    append(out, lo, p.index(s->begin), global_rows);
    append(out, std::max(lo, p.index(s->begin)), std::min(hi, p.index(s->end)), p.all);
    lo = p.index(s->end);
  }
  append(out, lo, hi, global_rows);
}

void SpanFinder::random(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const int64_t per_row = node[2], block = node[3], blocks = ceil_div(p.Lk, block);
  const size_t list = out.size();
  for (int t = 0; t < p.rows.count;) {
    const int64_t r = floor_div(p.query(t), block);
    uint32_t lanes = 0;
    for (; t < p.rows.count && floor_div(p.query(t), block) == r; ++t) lanes |= 1u << t;
    const size_t next = begin_list(out, list);
    for (int64_t b : random_blocks(per_row, static_cast<uint64_t>(node[4]), r, blocks))
      append(out, std::max(lo, p.index(b * block)), std::min(hi, p.index((b + 1) * block)), lanes);
    if (next > list) merge(out, list, next, std::bit_or<uint32_t>());
  }
}

// If the panel's step is a multiple of the dilation, all distances within the residue class are allowed.
void SpanFinder::dilated(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const int64_t step = node[2];
  if (p.rows.step % step == 0) return append(out, lo, hi, p.all);
  for (int64_t n = lo; n < hi; ++n) {
    uint32_t lanes = 0;
    for (int t = 0; t < p.rows.count; ++t) lanes |= modulo(p.query(t) - p.key(n), step) == 0 ? 1u << t : 0;
    append(out, n, n + 1, lanes);
  }
}

void SpanFinder::dense(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const MaskTensor& t = call_.tensors[node[2]];
  const uint8_t* row[kMaxPanel];
  for (int i = 0; i < p.rows.count; ++i)
    row[i] = element<uint8_t>(t, p.rows.batch, p.rows.head, p.rows.row + i * p.rows.step, p.key(lo));
  read_rows(row, p.rows.count, t.stride[3] * p.rows.step, lo, hi, out);
}

void SpanFinder::blocks(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const MaskTensor& t = call_.tensors[node[2]];
  const int64_t block = node[3];
  // The rows of the block table that the panel's rows fall in, and the lanes of each.
  const uint8_t* row[kMaxPanel];
  uint32_t lanes_of[kMaxPanel];
  int rows = 0;
  int64_t previous = -1;
  for (int i = 0; i < p.rows.count; ++i) {
    const int64_t qb = (p.rows.row + i * p.rows.step) / block;
    if (qb != previous) {
      row[rows] = element<uint8_t>(t, p.rows.batch, p.rows.head, qb, 0);
      lanes_of[rows++] = 0;
    }
    lanes_of[rows - 1] |= 1u << i;
    previous = qb;
  }
  for (int64_t kb = p.key(lo) / block; p.index(kb * block) < hi; ++kb) {
    uint32_t lanes = 0;
    for (int i = 0; i < rows; ++i) lanes |= row[i][kb * t.stride[3]] ? lanes_of[i] : 0;
    append(out, std::max(lo, p.index(kb * block)), std::min(hi, p.index((kb + 1) * block)), lanes);
  }
}

void SpanFinder::patterns(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const MaskTensor &table = call_.tensors[node[2]], &patterns = call_.tensors[node[3]];
  const int64_t height = patterns.size[2], width = patterns.size[3];
  const uint8_t* row[kMaxPanel];
  for (int64_t kb = p.key(lo) / width; p.index(kb * width) < hi; ++kb) {
    const int64_t begin = std::max(lo, p.index(kb * width)), end = std::min(hi, p.index((kb + 1) * width));
    uint32_t full = 0, partial = 0;
    for (int t = 0; t < p.rows.count; ++t) {
      const int64_t i = p.rows.row + t * p.rows.step;
      int64_t n = *element<int64_t>(table, p.rows.batch, p.rows.head, i / height, kb);
      if (n < 0 || n >= patterns.size[1]) n = 0;  // the table of a compiled call is not checked
      full |= n == 1 ? 1u << t : 0;
      partial |= n > 1 ? 1u << t : 0;
      row[t] = element<uint8_t>(patterns, 0, n, i % height, p.key(begin) - kb * width);
    }
    // Pattern 0 allows no pair of a block, pattern 1 all pairs.
    if (partial)
      read_rows(row, p.rows.count, patterns.stride[3] * p.rows.step, begin, end, out);
    else
      append(out, begin, end, full);
  }
}

void SpanFinder::per_head(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  evaluate(child_of(node, p.rows.head), p, lo, hi, out);
}

// NOT: the complement of the child within [lo, hi).
void SpanFinder::invert(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const size_t list = out.size();
  evaluate(node + 2, p, lo, hi, out);
  const size_t top = out.size() + 1;
  out.push_back(kSentinel);
  for (size_t i = list; i + 1 < top; ++i) {
    const Span span = out[i];
    append(out, lo, span.begin, p.all);
    append(out, span.begin, span.end, p.all & ~span.lanes);
    lo = span.end;
  }
  append(out, lo, hi, p.all);
  out.erase(out.begin() + list, out.begin() + top);
}

// CUT: evaluates the child in the coordinates of the call that the mask was cut from. The shift of first_key
// leaves the indices of keys as they are.
void SpanFinder::cut(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  Rows rows = p.rows;
  rows.head += node[2];
  rows.row += node[4];
  const int64_t first_key = node[5];
  const Panel whole{rows, p.position + first_key, p.first_key + first_key, p.diagonal, p.all, node[7]};
  evaluate(first_child(node), whole, lo, hi, out);
}

// AND and OR. Each operand of AND is evaluated only within the range that the operands before it leave.
void SpanFinder::combine(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const int64_t* end = node + node[1];
  const size_t list = out.size();
  evaluate(node + 2, p, lo, hi, out);
  for (const int64_t* child = child_of(node, 1); child < end; child += child[1]) {
    if (node[0] == kAnd) {
      if (out.size() == list) return;
      lo = out[list].begin;
      hi = out.back().end;
      if (is_full(out, list, lo, hi, p.all)) out.resize(list);
    }
    const size_t next = begin_list(out, list);
    evaluate(child, p, lo, hi, out);
    if (next == list) continue;
    if (node[0] == kOr)
      merge(out, list, next, std::bit_or<uint32_t>());
    else if (is_full(out, next, lo, hi, p.all))
      out.resize(next - 1);
    else
      merge(out, list, next, std::bit_and<uint32_t>());
  }
}

namespace {

// Sums over the spans of a panel: keys, keys of full spans, (query, key) pairs.
struct Sums {
  int64_t keys = 0, full = 0, pairs = 0;
};

inline __attribute__((always_inline)) Sums add_up(const Spans& spans, uint32_t all) {
  Sums sums;
  for (const Span& span : spans) {
    const int64_t n = span.end - span.begin;
    sums.keys += n;
    sums.full += span.lanes == all ? n : 0;
    sums.pairs += n * __builtin_popcount(span.lanes);
  }
  return sums;
}

// Uses the popcnt instruction if the CPU has it: counting bits without it takes longer than finding
// the spans. The baseline of x86-64 does not include popcnt.
#ifdef __x86_64__
__attribute__((target("popcnt"))) Sums sums_fast(const Spans& spans, uint32_t all) {
  return add_up(spans, all);
}
Sums sums_slow(const Spans& spans, uint32_t all) { return add_up(spans, all); }
const auto sums_of = __builtin_cpu_supports("popcnt") ? sums_fast : sums_slow;
#else
const auto sums_of = add_up;
#endif

}  // namespace

Cost measure(const SpanFinder& finder, const Spec& spec, int panel, bool (*stop)(void*), void* context) {
  Cost cost;
  Spans spans;
  const int64_t samples = finder.varies_by_batch() ? spec.B : 1,
                heads = finder.varies_by_head() ? spec.Hq : 1;
  const int64_t repeat = (spec.B / std::max<int64_t>(samples, 1)) * (spec.Hq / std::max<int64_t>(heads, 1));
  for (int64_t b = 0; b < std::min(samples, spec.B); ++b)
    for (int64_t h = 0; h < std::min(heads, spec.Hq); ++h) {
      const int64_t step = finder.dilation(h), keys = ceil_div(spec.Lk, step);
      for (int64_t c = 0; c < std::min(step, spec.Lq); ++c) {
        const int64_t rows = ceil_div(spec.Lq - c, step);
        for (int64_t i = 0; i < rows && !stop(context); i += panel) {
          const int count = static_cast<int>(std::min<int64_t>(panel, rows - i));
          finder.find({b, h, c + i * step, step, count}, spans);
          const Sums sums = sums_of(spans, first_lanes(count));
          cost.pairs += repeat * sums.pairs;
          cost.touched += repeat * sums.keys * (count <= panel / 4 ? count : panel);
          cost.full += repeat * sums.full;
          cost.partial += repeat * (sums.keys - sums.full);
          cost.empty += repeat * (keys - sums.keys);
        }
      }
    }
  return cost;
}

}  // namespace regard
