#include "spans.h"

#include <string.h>

#include <algorithm>
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

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }
int64_t modulo(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }

// Adds a run, joined to the last one where they touch and agree.
void append(std::vector<Run>& out, int64_t begin, int64_t end, uint32_t lanes) {
  if (begin >= end || lanes == 0) return;
  if (!out.empty() && out.back().end == begin && out.back().lanes == lanes)
    out.back().end = end;
  else
    out.push_back({begin, end, lanes});
}

// Walks two run lists together over [lo, hi) and writes join(lanes of a, lanes of b).
template <class Join>
void merge(const std::vector<Run>& a, const std::vector<Run>& b, int64_t lo, int64_t hi, Join join,
           std::vector<Run>& out) {
  size_t i = 0, j = 0;
  out.clear();
  while (lo < hi) {
    while (i < a.size() && a[i].end <= lo) ++i;
    while (j < b.size() && b[j].end <= lo) ++j;
    int64_t stop = hi;
    uint32_t x = 0, y = 0;
    if (i < a.size())
      (a[i].begin <= lo) ? (x = a[i].lanes, stop = std::min(stop, a[i].end))
                         : stop = std::min(stop, a[i].begin);
    if (j < b.size())
      (b[j].begin <= lo) ? (y = b[j].lanes, stop = std::min(stop, b[j].end))
                         : stop = std::min(stop, b[j].begin);
    append(out, lo, stop, join(x, y));
    lo = stop;
  }
}

uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// The key blocks chosen for block row r, ascending.
std::vector<int64_t> choose(int64_t per_row, uint64_t seed, int64_t r, int64_t blocks) {
  std::vector<int64_t> chosen;
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

// Divides every allowed distance; 1 where nothing is known.
int64_t dilation_of(const int64_t* node, int64_t head) {
  const int64_t* end = node + node[1];
  switch (node[0]) {
    case kDilated:
      return node[2] < kLargestStep ? node[2] : 1;
    case kPerHead:
      return dilation_of(child_of(node, head), head);
    case kAnd:
    case kOr: {
      int64_t step = dilation_of(node + 2, head);
      for (const int64_t* child = child_of(node, 1); child < end; child += child[1]) {
        const int64_t other = dilation_of(child, head);
        // Both factors are below 2^31, so the lcm fits.
        step = node[0] == kAnd ? std::lcm(step, other) : std::gcd(step, other);
        if (step >= kLargestStep) step = 1;
      }
      return step;
    }
    default:
      return 1;
  }
}

template <class T>
const T* element(const MaskTensor& t, int64_t b, int64_t h, int64_t q, int64_t k) {
  return static_cast<const T*>(t.data) + b * t.stride[0] + h * t.stride[1] + q * t.stride[2] +
         k * t.stride[3];
}

}  // namespace

struct Spans::Panel {
  const Rows& rows;
  int64_t position;
  uint32_t all;
  int64_t at(int t) const { return position + t * rows.step; }
};

Spans::Spans(const std::vector<int64_t>& code, const Spec& spec, const Call& call)
    : code_(code), spec_(spec), call_(call) {
  by_batch_ = !code.empty() && call.offsets;
  if (!code.empty()) inspect(code.data());
}

void Spans::inspect(const int64_t* node) {
  const auto look = [&](int64_t t) {
    by_batch_ |= call_.tensors[t].size[0] > 1;
    by_head_ |= call_.tensors[t].size[1] > 1;
  };
  switch (node[0]) {
    case kDocuments:
      look(node[3]);
      [[fallthrough]];
    case kTokens:
      segment(node);
      [[fallthrough]];
    case kLengths:
    case kGlobal:
    case kDense:
    case kBlocks:
      look(node[2]);
      break;
    case kPerHead:
      by_head_ = true;
      [[fallthrough]];
    case kAnd:
    case kOr:
    case kNot:
      for (const int64_t* child = node + 2; child < node + node[1]; child += child[1]) inspect(child);
      break;
    default:
      break;
  }
}

void Spans::segment(const int64_t* node) {
  const MaskTensor& ids = call_.tensors[node[0] == kDocuments ? node[3] : node[2]];
  std::vector<std::vector<Segment>> samples(ids.size[0]);
  for (int64_t b = 0; b < ids.size[0]; ++b)
    for (int64_t j = 0; j < spec_.Lk; ++j) {
      const int64_t id = *element<int64_t>(ids, b, 0, 0, j);
      if (samples[b].empty() || samples[b].back().id != id) samples[b].push_back({j, id});
    }
  document_nodes_.push_back(node);
  segments_.push_back(std::move(samples));
}

int64_t Spans::dilation(int64_t head) const { return code_.empty() ? 1 : dilation_of(code_.data(), head); }

bool Spans::dilation_varies() const {
  for (int64_t h = 1; h < spec_.Hq; ++h)
    if (dilation(h) != dilation(0)) return true;
  return false;
}

int64_t Spans::position(const Rows& rows) const {
  return (call_.offsets ? call_.offsets[rows.batch] : call_.offset) + rows.row;
}

int64_t Spans::first_key(const Rows& rows) const { return modulo(position(rows), rows.step); }

void Spans::find(const Rows& rows, Runs& out) const { find(rows, 0, ceil_div(spec_.Lk, rows.step), out); }

void Spans::find(const Rows& rows, int64_t begin, int64_t end, Runs& out) const {
  out.clear();
  const Panel p{rows, position(rows), first_lanes(rows.count)};
  const int64_t first = first_key(rows);
  const int64_t lo = std::min(first + begin * rows.step, spec_.Lk),
                hi = std::min(first + end * rows.step, spec_.Lk);
  if (lo >= hi) return;
  if (code_.empty())
    append(out, lo, hi, p.all);
  else
    evaluate(code_.data(), p, lo, hi, out);
  if (rows.step == 1) return;
  size_t kept = 0;
  for (Run run : out) {
    run.begin = std::max<int64_t>(ceil_div(run.begin - first, rows.step), 0);
    run.end = ceil_div(run.end - first, rows.step);
    if (run.begin >= run.end) continue;
    if (kept && out[kept - 1].end == run.begin && out[kept - 1].lanes == run.lanes)
      out[kept - 1].end = run.end;
    else
      out[kept++] = run;
  }
  out.resize(kept);
}

void Spans::evaluate(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const {
  out.clear();
  switch (node[0]) {
    case kWindow:
      return window(node, p, lo, hi, out);
    case kLengths: {
      const MaskTensor& n = call_.tensors[node[2]];
      return append(out, lo, std::min(hi, *element<int64_t>(n, p.rows.batch, 0, 0, 0)), p.all);
    }
    case kDocuments:
    case kTokens:
      return documents(node, p, lo, hi, out);
    case kPrefix:
      return append(out, lo, std::min(hi, node[2]), p.all);
    case kGlobal:
      return global(node, p, lo, hi, out);
    case kRandom:
      return random(node, p, lo, hi, out);
    case kDilated:
      return dilated(node, p, lo, hi, out);
    case kDense:
      return dense(node, p, lo, hi, out);
    case kBlocks:
      return blocks(node, p, lo, hi, out);
    case kPerHead:
      return evaluate(child_of(node, p.rows.head), p, lo, hi, out);
    default:
      return combine(node, p, lo, hi, out);
  }
}

// Row t sees [begin + t * step, end + t * step).
void Spans::window(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const {
  const int64_t step = p.rows.step, begin = node[2] == kUnlimited ? -kUnlimited : p.position - node[2];
  const int64_t end = node[3] == kUnlimited ? kUnlimited : p.position + node[3] + 1;
  const int64_t last = (p.rows.count - 1) * step;
  const bool opens = begin >= lo, closes = end + last <= hi;
  if ((opens || begin + last <= lo) && (closes || end >= hi) && begin + last < std::min(end, hi) && end > lo)
    band(p, opens ? begin : lo, closes ? end : hi, opens, closes, out);
  else
    sweep(p, begin, end, lo, hi, out);
}

// The usual panel: rows join one by one, all see the middle, rows leave one by one.
void Spans::band(const Panel& p, int64_t begin, int64_t end, bool opens, bool closes, Runs& out) {
  const int64_t step = p.rows.step;
  const int edges = p.rows.count - 1;
  out.resize((opens ? edges : 0) + 1 + (closes ? edges : 0));
  Run* run = out.data();
  for (int t = 0; opens && t < edges; ++t, begin += step) *run++ = {begin, begin + step, first_lanes(t + 1)};
  *run++ = {begin, end, p.all};
  for (int t = 0; closes && t < edges; ++t, end += step)
    *run++ = {end, end + step, p.all & ~first_lanes(t + 1)};
}

// A panel at the edge of the keys: sweep over both ends, which grow with t.
void Spans::sweep(const Panel& p, int64_t begin, int64_t end, int64_t lo, int64_t hi, Runs& out) {
  const int64_t step = p.rows.step;
  const int rows = p.rows.count;
  int opened = 0, closed = 0;
  for (int64_t key = lo; key < hi;) {
    while (opened < rows && begin + opened * step <= key) ++opened;
    while (closed < opened && end + closed * step <= key) ++closed;
    if (closed == rows) return;
    int64_t stop = closed < opened ? std::min(hi, end + closed * step) : hi;
    if (opened < rows) stop = std::min(stop, begin + opened * step);
    const uint32_t lanes = first_lanes(opened) & ~first_lanes(closed);
    if (lanes) out.push_back({key, stop, lanes});
    key = stop;
  }
}

void Spans::documents(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const {
  const MaskTensor& ids = call_.tensors[node[2]];
  const size_t which =
      std::find(document_nodes_.begin(), document_nodes_.end(), node) - document_nodes_.begin();
  const auto& samples = segments_[which];
  const auto& segments = samples[samples.size() > 1 ? p.rows.batch : 0];
  int64_t own[kMaxPanel];
  uint32_t known = 0;
  for (int t = 0; t < p.rows.count; ++t) {
    const int64_t at = node[0] == kTokens ? p.at(t) : p.rows.row + t * p.rows.step;
    if (node[0] == kTokens && (at < 0 || at >= spec_.Lk)) continue;
    own[t] = *element<int64_t>(ids, p.rows.batch, 0, 0, at);
    known |= 1u << t;
  }
  auto s = std::upper_bound(segments.begin(), segments.end(), lo,
                            [](int64_t key, const Segment& x) { return key < x.begin; });
  if (s != segments.begin()) --s;
  for (; s != segments.end() && s->begin < hi; ++s) {
    uint32_t lanes = 0;
    for (int t = 0; t < p.rows.count; ++t) lanes |= (known >> t & 1) && own[t] == s->id ? 1u << t : 0;
    append(out, std::max(lo, s->begin), std::min(hi, s + 1 == segments.end() ? spec_.Lk : s[1].begin), lanes);
  }
}

void Spans::global(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const {
  const MaskTensor& t = call_.tensors[node[2]];
  const int64_t* first = element<int64_t>(t, p.rows.batch, 0, 0, 0);
  const int64_t* last = first + t.size[3];
  uint32_t everywhere = 0;
  for (int i = 0; i < p.rows.count; ++i)
    everywhere |= p.at(i) >= 0 && std::binary_search(first, last, p.at(i)) ? 1u << i : 0;
  int64_t key = lo;
  for (const int64_t* token = std::lower_bound(first, last, lo); token < last && *token < hi; ++token) {
    append(out, key, *token, everywhere);
    append(out, std::max(key, *token), *token + 1, p.all);
    key = *token + 1;
  }
  append(out, key, hi, everywhere);
}

void Spans::random(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const {
  const int64_t per_row = node[2], block = node[3], blocks = ceil_div(spec_.Lk, block);
  Runs one, both;
  for (int t = 0; t < p.rows.count;) {
    const int64_t r = floor_div(p.at(t), block);
    uint32_t lanes = 0;
    for (; t < p.rows.count && floor_div(p.at(t), block) == r; ++t) lanes |= 1u << t;
    one.clear();
    for (int64_t b : choose(per_row, static_cast<uint64_t>(node[4]), r, blocks))
      append(one, std::max(lo, b * block), std::min(hi, (b + 1) * block), lanes);
    if (lanes == p.all) return out.swap(one);
    merge(out, one, lo, hi, [](uint32_t x, uint32_t y) { return x | y; }, both);
    out.swap(both);
  }
}

// In a residue class of a multiple of the step, every pair has an allowed distance.
void Spans::dilated(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const {
  const int64_t step = node[2];
  if (p.rows.step % step == 0) return append(out, lo, hi, p.all);
  for (int64_t key = lo; key < hi; ++key) {
    uint32_t lanes = 0;
    for (int t = 0; t < p.rows.count; ++t) lanes |= modulo(p.at(t) - key, step) == 0 ? 1u << t : 0;
    append(out, key, key + 1, lanes);
  }
}

void Spans::dense(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const {
  const MaskTensor& t = call_.tensors[node[2]];
  const uint8_t* row[kMaxPanel];
  for (int i = 0; i < p.rows.count; ++i)
    row[i] = element<uint8_t>(t, p.rows.batch, p.rows.head, p.rows.row + i * p.rows.step, 0);
  const int64_t stride = t.stride[3];
  for (int64_t key = lo; key < hi;) {
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

void Spans::blocks(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const {
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
  for (int64_t kb = lo / block; kb * block < hi; ++kb) {
    uint32_t lanes = 0;
    for (int i = 0; i < rows; ++i) lanes |= row[i][kb * t.stride[3]] ? lanes_of[i] : 0;
    append(out, std::max(lo, kb * block), std::min(hi, (kb + 1) * block), lanes);
  }
}

void Spans::combine(const int64_t* node, const Panel& p, int64_t lo, int64_t hi, Runs& out) const {
  const int64_t* end = node + node[1];
  Runs next, joined;
  evaluate(node + 2, p, lo, hi, out);
  if (node[0] == kNot) {
    merge(out, next, lo, hi, [&](uint32_t x, uint32_t) { return ~x & p.all; }, joined);
    out.swap(joined);
    return;
  }
  for (const int64_t* child = child_of(node, 1); child < end; child += child[1]) {
    if (node[0] == kAnd) {
      if (out.empty()) return;
      lo = out.front().begin;
      hi = out.back().end;
    }
    evaluate(child, p, lo, hi, next);
    if (node[0] == kAnd)
      merge(out, next, lo, hi, [](uint32_t x, uint32_t y) { return x & y; }, joined);
    else
      merge(out, next, lo, hi, [](uint32_t x, uint32_t y) { return x | y; }, joined);
    out.swap(joined);
  }
}

Cost measure(const Spans& spans, const Spec& spec, int panel) {
  Cost cost;
  std::vector<Run> runs;
  const int64_t samples = spans.varies_by_batch() ? spec.B : 1, heads = spans.varies_by_head() ? spec.Hq : 1;
  const int64_t repeat = (spec.B / std::max<int64_t>(samples, 1)) * (spec.Hq / std::max<int64_t>(heads, 1));
  for (int64_t b = 0; b < std::min(samples, spec.B); ++b)
    for (int64_t h = 0; h < std::min(heads, spec.Hq); ++h) {
      const int64_t step = spans.dilation(h);
      for (int64_t c = 0; c < std::min(step, spec.Lq); ++c)
        for (int64_t row = c; row < spec.Lq; row += step * panel) {
          const int count = static_cast<int>(std::min<int64_t>(panel, ceil_div(spec.Lq - row, step)));
          spans.find({b, h, row, step, count}, runs);
          int64_t seen = 0;
          for (const Run& run : runs) {
            const int64_t n = run.end - run.begin;
            seen += n;
            cost.pairs += repeat * n * __builtin_popcount(run.lanes);
            (run.lanes == first_lanes(count) ? cost.full : cost.partial) += repeat * n;
          }
          cost.touched += repeat * seen * (count <= panel / 4 ? count : panel);
          cost.empty += repeat * (ceil_div(spec.Lk, step) - seen);
        }
    }
  return cost;
}

}  // namespace regard
