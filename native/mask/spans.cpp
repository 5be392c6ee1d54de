#include "mask/spans.h"

#include <string.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

namespace regard {
namespace {

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
  kPerHead,
  kAnd,
  kOr,
  kNot
};

constexpr int64_t kUnlimited = int64_t{1} << 62;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

uint32_t first_lanes(int n) { return n >= 32 ? ~0u : (1u << n) - 1; }

int64_t floor_div(int64_t a, int64_t b) {
  return b == 1 ? a : a / b - (a % b != 0 && (a < 0) != (b < 0));  // steps are mostly 1, divisions slow
}
int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }
int64_t modulo(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

// Adds a run, joined to the last one where they touch and agree.
void append(Spans& out, int64_t begin, int64_t end, uint32_t lanes) {
  if (begin >= end || lanes == 0) return;
  if (!out.empty() && out.back().end == begin && out.back().lanes == lanes)
    out.back().end = end;
  else
    out.push_back({begin, end, lanes});
}

// Operands lie one after the other in one vector, like on a stack, so that combining them allocates nothing.
// kEnd stands between them: it touches no run and comes after all.
constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
constexpr Span kEnd = {kLast, kLast, 0};

// Where the next list begins, when the last one began at `before`. An empty one is replaced.
size_t begin_list(Spans& out, size_t before) {
  if (out.size() > before) out.push_back(kEnd);
  return out.size();
}

// Whether the last list, which begins at a, says that all rows see [lo, hi).
bool is_full(const Spans& out, size_t a, int64_t lo, int64_t hi, uint32_t all) {
  return out.size() == a + 1 && out[a].begin == lo && out[a].end == hi && out[a].lanes == all;
}

// The last two lists, which begin at a and b, become one: join(lanes of a, lanes of b) for every key.
template <class Join>
void merge(Spans& out, size_t a, size_t b, Join join) {
  out.push_back(kEnd);
  const size_t top = out.size();
  out.resize(top + 2 * (top - a));  // a run for every end of a run is more than enough
  const Span *x = &out[a], *y = &out[b];
  Span* last = &out[top - 1];
  for (int64_t key = 0; (key = std::max(key, std::min(x->begin, y->begin))) < kLast;) {
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

// Row t sees [begin + t, end + t). In the usual panel rows join one by one, all see the middle, rows leave
// one by one.
void band(int rows, int64_t begin, int64_t end, bool opens, bool closes, Spans& out) {
  const int edges = rows - 1;
  const uint32_t all = first_lanes(rows);
  const size_t before = out.size();
  out.resize(before + (opens ? edges : 0) + 1 + (closes ? edges : 0));
  Span* span = &out[before];
  for (uint32_t lanes = 1; opens && lanes != all; lanes = lanes << 1 | 1, ++begin)
    *span++ = {begin, begin + 1, lanes};
  *span++ = {begin, end, all};
  for (uint32_t lanes = all; closes && (lanes = lanes << 1 & all); ++end) *span++ = {end, end + 1, lanes};
}

// A panel at the edge of the keys: sweep over both ends, which grow with t.
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

// Adds a key that comes after all others.
void extend(Segments& segments, int64_t key, int64_t id) {
  if (!segments.empty() && segments.back().end == key && segments.back().id == id)
    segments.back().end = key + 1;
  else
    segments.push_back({key, key + 1, id});
}

// The first segment that has this key or a later one.
Segments::const_iterator reaching(const Segments& segments, int64_t key) {
  return std::upper_bound(segments.begin(), segments.end(), key,
                          [](int64_t k, const Segment& s) { return k < s.end; });
}

uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// The key blocks chosen for block row r, ascending.
std::vector<int64_t> choose(int64_t per_row, uint64_t seed, int64_t r, int64_t blocks) {
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
    const auto at = std::lower_bound(chosen.begin(), chosen.end(), block);
    if (at == chosen.end() || *at != block) chosen.insert(at, block);
  }
  return chosen;
}

const int64_t* child_of(const int64_t* node, int64_t n) {
  const int64_t* child = node + 2;
  while (n-- > 0) child += child[1];
  return child;
}

// Steps beyond this are not worth classes of their own, and products with them must not overflow.
constexpr int64_t kLargestStep = int64_t{1} << 31;

template <class T>
const T* element(const MaskTensor& t, int64_t b, int64_t h, int64_t q, int64_t k) {
  return static_cast<const T*>(t.data) + b * t.stride[0] + h * t.stride[1] + q * t.stride[2] +
         k * t.stride[3];
}

}  // namespace

// The rows of a panel, and the keys of their residue class by number: number n is key first + n * step.
struct SpanFinder::Panel {
  const Rows& rows;
  int64_t position;    // of the first row
  int64_t first, own;  // own: the number of the key at `position`
  uint32_t all;

  int64_t at(int t) const { return position + t * rows.step; }
  int64_t key(int64_t number) const { return first + number * rows.step; }
  // The number of the first key that is not before this one.
  int64_t number(int64_t key) const { return ceil_div(key - first, rows.step); }
};

SpanFinder::SpanFinder(const std::vector<int64_t>& code, const Spec& spec, const Call& call)
    : code_(code), spec_(spec), call_(call) {
  if (code.empty()) return;
  by_batch_ = call.offsets != nullptr;
  inspect(code.data());
  if (code[0] != kPerHead) return;
  for (const int64_t* child = &code[2]; child < &code[0] + code[1]; child += child[1])
    heads_.push_back(child);
}

const int64_t* SpanFinder::code_of(int64_t head) const {
  return heads_.empty() ? code_.data() : heads_[head];
}

// Everything that is asked about an op, in the order of Op.
struct SpanFinder::Atom {
  void (SpanFinder::*find)(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const;
  int tensors = 0;     // the first arguments are numbers of tensors
  int segmented = -1;  // the tensor whose keys or tokens lie in segments
  int64_t (*dilation)(const int64_t* node, int64_t head) = nullptr;  // divides every allowed distance
};

const SpanFinder::Atom SpanFinder::kAtoms[] = {
    {},                                               // there is no op 0
    {&SpanFinder::window},                            // kWindow
    {&SpanFinder::lengths, 1},                        // kLengths
    {&SpanFinder::documents, 2, 1},                   // kDocuments
    {&SpanFinder::documents, 1, 0},                   // kTokens
    {&SpanFinder::prefix},                            // kPrefix
    {&SpanFinder::global, 1, 0},                      // kGlobal
    {&SpanFinder::random},                            // kRandom
    {&SpanFinder::dilated, 0, -1, own_step},          // kDilated
    {&SpanFinder::dense, 1},                          // kDense
    {&SpanFinder::blocks, 1},                         // kBlocks
    {&SpanFinder::per_head, 0, -1, step_of_head},     // kPerHead
    {&SpanFinder::combine, 0, -1, step_of_children},  // kAnd
    {&SpanFinder::combine, 0, -1, step_of_children},  // kOr
    {&SpanFinder::invert},                            // kNot
};

int64_t SpanFinder::own_step(const int64_t* node, int64_t) { return node[2] < kLargestStep ? node[2] : 1; }

int64_t SpanFinder::step_of_head(const int64_t* node, int64_t head) {
  return dilation_of(child_of(node, head), head);
}

// 1 where nothing is known.
int64_t SpanFinder::dilation_of(const int64_t* node, int64_t head) {
  const Atom& atom = kAtoms[node[0]];
  return atom.dilation ? atom.dilation(node, head) : 1;
}

int64_t SpanFinder::step_of_children(const int64_t* node, int64_t head) {
  int64_t step = dilation_of(node + 2, head);
  for (const int64_t* child = child_of(node, 1); child < node + node[1]; child += child[1]) {
    const int64_t other = dilation_of(child, head);
    // Both factors are below 2^31, so the lcm fits.
    step = node[0] == kAnd ? std::lcm(step, other) : std::gcd(step, other);
    if (step >= kLargestStep) step = 1;
  }
  return step;
}

void SpanFinder::inspect(const int64_t* node) {
  const Atom& atom = kAtoms[node[0]];
  for (int i = 0; i < atom.tensors; ++i) {
    const MaskTensor& t = call_.tensors[node[2 + i]];
    by_batch_ |= t.size[0] > 1;
    by_head_ |= t.size[1] > 1;
  }
  if (atom.segmented >= 0) segment(node);
  by_head_ |= node[0] == kPerHead;
  if (node[0] < kPerHead) return;
  for (const int64_t* child = node + 2; child < node + node[1]; child += child[1]) inspect(child);
}

void SpanFinder::segment(const int64_t* node) {
  const MaskTensor& t = call_.tensors[node[2 + kAtoms[node[0]].segmented]];
  std::vector<Segments> samples(t.size[0]);
  for (int64_t b = 0; b < t.size[0]; ++b)
    for (int64_t i = 0; i < t.size[3]; ++i) {
      const int64_t value = *element<int64_t>(t, b, 0, 0, i);
      if (node[0] != kGlobal)
        extend(samples[b], i, value);
      else if (value >= 0 && value < kUnlimited)
        extend(samples[b], value, 0);
    }
  segmented_.push_back(node);
  segments_.push_back(std::move(samples));
}

const Segments& SpanFinder::segments(const int64_t* node, const Panel& p) const {
  const size_t which = std::find(segmented_.begin(), segmented_.end(), node) - segmented_.begin();
  const std::vector<Segments>& samples = segments_[which];
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
  const int64_t at = position(rows), own = floor_div(at, rows.step);
  const Panel p{rows, at, at - own * rows.step, own, first_lanes(rows.count)};
  end = std::min(end, p.number(spec_.Lk));
  out.clear();
  if (code_.empty())
    append(out, begin, end, p.all);
  else if (begin < end)
    evaluate(code_of(rows.head), p, begin, end, out);
}

void SpanFinder::evaluate(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  (this->*kAtoms[node[0]].find)(node, p, lo, hi, out);
}

void SpanFinder::window(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const int64_t begin = node[2] == kUnlimited ? -kUnlimited : p.own - floor_div(node[2], p.rows.step);
  const int64_t end = node[3] == kUnlimited ? kUnlimited : p.own + floor_div(node[3], p.rows.step) + 1;
  const int64_t last = p.rows.count - 1;
  const bool opens = begin >= lo, closes = end + last <= hi;
  if ((opens || begin + last <= lo) && (closes || end >= hi) && begin + last < std::min(end, hi) && end > lo)
    band(p.rows.count, opens ? begin : lo, closes ? end : hi, opens, closes, out);
  else
    sweep(p.rows.count, begin, end, lo, hi, out);
}

void SpanFinder::lengths(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const MaskTensor& n = call_.tensors[node[2]];
  append(out, lo, std::min(hi, p.number(*element<int64_t>(n, p.rows.batch, 0, 0, 0))), p.all);
}

void SpanFinder::prefix(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  append(out, lo, std::min(hi, p.number(node[2])), p.all);
}

void SpanFinder::documents(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const MaskTensor& ids = call_.tensors[node[2]];
  int64_t own[kMaxPanel];
  uint32_t known = 0;
  for (int t = 0; t < p.rows.count; ++t) {
    const int64_t at = node[0] == kTokens ? p.at(t) : p.rows.row + t * p.rows.step;
    if (node[0] == kTokens && (at < 0 || at >= spec_.Lk)) continue;
    own[t] = *element<int64_t>(ids, p.rows.batch, 0, 0, at);
    known |= 1u << t;
  }
  const Segments& keys = segments(node, p);
  for (auto s = reaching(keys, p.key(lo)); s != keys.end() && p.number(s->begin) < hi; ++s) {
    uint32_t lanes = 0;
    for (int t = 0; t < p.rows.count; ++t) lanes |= (known >> t & 1) && own[t] == s->id ? 1u << t : 0;
    append(out, std::max(lo, p.number(s->begin)), std::min(hi, p.number(s->end)), lanes);
  }
}

void SpanFinder::global(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const Segments& tokens = segments(node, p);
  const auto lane = [&](int64_t position) {
    return std::clamp<int64_t>(p.number(position) - p.own, 0, p.rows.count);
  };
  uint32_t everywhere = 0;  // rows that are tokens themselves
  for (auto s = reaching(tokens, p.position); s != tokens.end() && lane(s->begin) < p.rows.count; ++s)
    everywhere |= first_lanes(lane(s->end)) & ~first_lanes(lane(s->begin));
  for (auto s = reaching(tokens, p.key(lo)); s != tokens.end() && p.number(s->begin) < hi; ++s) {
    append(out, lo, p.number(s->begin), everywhere);
    append(out, std::max(lo, p.number(s->begin)), std::min(hi, p.number(s->end)), p.all);
    lo = p.number(s->end);
  }
  append(out, lo, hi, everywhere);
}

void SpanFinder::random(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const int64_t per_row = node[2], block = node[3], blocks = ceil_div(spec_.Lk, block);
  const size_t before = out.size();
  for (int t = 0; t < p.rows.count;) {
    const int64_t r = floor_div(p.at(t), block);
    uint32_t lanes = 0;
    for (; t < p.rows.count && floor_div(p.at(t), block) == r; ++t) lanes |= 1u << t;
    const size_t next = begin_list(out, before);
    for (int64_t b : choose(per_row, static_cast<uint64_t>(node[4]), r, blocks))
      append(out, std::max(lo, p.number(b * block)), std::min(hi, p.number((b + 1) * block)), lanes);
    if (next > before) merge(out, before, next, std::bit_or<uint32_t>());
  }
}

// In a residue class of a multiple of the step, every pair has an allowed distance.
void SpanFinder::dilated(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const int64_t step = node[2];
  if (p.rows.step % step == 0) return append(out, lo, hi, p.all);
  for (int64_t n = lo; n < hi; ++n) {
    uint32_t lanes = 0;
    for (int t = 0; t < p.rows.count; ++t) lanes |= modulo(p.at(t) - p.key(n), step) == 0 ? 1u << t : 0;
    append(out, n, n + 1, lanes);
  }
}

void SpanFinder::dense(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const MaskTensor& t = call_.tensors[node[2]];
  const uint8_t* row[kMaxPanel];
  for (int i = 0; i < p.rows.count; ++i)
    row[i] = element<uint8_t>(t, p.rows.batch, p.rows.head, p.rows.row + i * p.rows.step, p.first);
  const int64_t stride = t.stride[3] * p.rows.step;
  for (int64_t key = lo; key < hi;) {  // by number
    if (stride == 1 && key + 8 <= hi) {
      uint64_t some = 0, every = ~uint64_t{0};
      for (int i = 0; i < p.rows.count; ++i) {
        uint64_t eight;
        memcpy(&eight, row[i] + key, 8);
        some |= eight;
        every &= eight;
      }
      if (some == 0 || every == 0x0101010101010101u) {
        append(out, key, key + 8, some ? p.all : 0);
        key += 8;
        continue;
      }
    }
    const int64_t stop = std::min(hi, key + 8);
    for (; key < stop; ++key) {
      uint32_t lanes = 0;
      for (int i = 0; i < p.rows.count; ++i) lanes |= static_cast<uint32_t>(row[i][key * stride] != 0) << i;
      append(out, key, key + 1, lanes);
    }
  }
}

void SpanFinder::blocks(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const MaskTensor& t = call_.tensors[node[2]];
  const int64_t block = node[3];
  // Rows of the table that the panel touches, and the lanes of each.
  const uint8_t* row[kMaxPanel];
  uint32_t lanes_of[kMaxPanel];
  int rows = 0;
  int64_t before = -1;
  for (int i = 0; i < p.rows.count; ++i) {
    const int64_t qb = (p.rows.row + i * p.rows.step) / block;
    if (qb != before) {
      row[rows] = element<uint8_t>(t, p.rows.batch, p.rows.head, qb, 0);
      lanes_of[rows++] = 0;
    }
    lanes_of[rows - 1] |= 1u << i;
    before = qb;
  }
  for (int64_t kb = p.key(lo) / block; p.number(kb * block) < hi; ++kb) {
    uint32_t lanes = 0;
    for (int i = 0; i < rows; ++i) lanes |= row[i][kb * t.stride[3]] ? lanes_of[i] : 0;
    append(out, std::max(lo, p.number(kb * block)), std::min(hi, p.number((kb + 1) * block)), lanes);
  }
}

void SpanFinder::per_head(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  evaluate(child_of(node, p.rows.head), p, lo, hi, out);
}

// What the child leaves of [lo, hi).
void SpanFinder::invert(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const size_t before = out.size();
  evaluate(node + 2, p, lo, hi, out);
  const size_t top = out.size() + 1;
  out.push_back(kEnd);
  for (size_t i = before; i + 1 < top; ++i) {
    const Span span = out[i];
    append(out, lo, span.begin, p.all);
    append(out, span.begin, span.end, p.all & ~span.lanes);
    lo = span.end;
  }
  append(out, lo, hi, p.all);
  out.erase(out.begin() + before, out.begin() + top);
}

// AND and OR of the children.
void SpanFinder::combine(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Spans& out) const {
  const int64_t* end = node + node[1];
  const size_t before = out.size();
  evaluate(node + 2, p, lo, hi, out);
  for (const int64_t* child = child_of(node, 1); child < end; child += child[1]) {
    if (node[0] == kAnd) {
      if (out.size() == before) return;
      lo = out[before].begin;
      hi = out.back().end;
      if (is_full(out, before, lo, hi, p.all)) out.resize(before);
    }
    const size_t next = begin_list(out, before);
    evaluate(child, p, lo, hi, out);
    if (next == before) continue;
    if (node[0] == kOr)
      merge(out, before, next, std::bit_or<uint32_t>());
    else if (is_full(out, next, lo, hi, p.all))
      out.resize(next - 1);
    else
      merge(out, before, next, std::bit_and<uint32_t>());
  }
}

namespace {

// What the spans of a panel add up to: keys, keys that all rows see, pairs.
struct Sums {
  int64_t seen = 0, full = 0, pairs = 0;
};

inline __attribute__((always_inline)) Sums add_up(const Spans& spans, uint32_t all) {
  Sums sums;
  for (const Span& span : spans) {
    const int64_t n = span.end - span.begin;
    sums.seen += n;
    sums.full += span.lanes == all ? n : 0;
    sums.pairs += n * __builtin_popcount(span.lanes);
  }
  return sums;
}

// The oldest x86 CPUs cannot count bits in one instruction; done otherwise, it costs more than finding the
// spans.
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

Cost measure(const SpanFinder& finder, const Spec& spec, int panel) {
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
        for (int64_t i = 0; i < rows; i += panel) {
          const int count = static_cast<int>(std::min<int64_t>(panel, rows - i));
          finder.find({b, h, c + i * step, step, count}, spans);
          const Sums sums = sums_of(spans, first_lanes(count));
          cost.pairs += repeat * sums.pairs;
          cost.touched += repeat * sums.seen * (count <= panel / 4 ? count : panel);
          cost.full += repeat * sums.full;
          cost.partial += repeat * (sums.seen - sums.full);
          cost.empty += repeat * (keys - sums.seen);
        }
      }
    }
  return cost;
}

}  // namespace regard
