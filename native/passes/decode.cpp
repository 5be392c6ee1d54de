#include <algorithm>

#include "passes/pass.h"

namespace regard {
namespace {

constexpr int64_t kBridged = 8;  // hidden keys between seen ones that are not worth a cut
constexpr int64_t kRows = 16;
constexpr double kInlineWork = 5e5;  // multiplications that are not worth a second thread

// Keys [begin, end) of a split, and which of `seen` lie in it.
struct Slice {
  int64_t begin, end, first_seen, n_seen;
};

// What the rows of one or more groups of heads see, and the splits that follow from it.
struct Seen {
  int64_t key;
  std::vector<Spans> spans;  // of each head, or of all
  std::vector<SpanList> lists;
  std::vector<Span> seen;  // by any of them
  std::vector<Slice> slices;
};

// The union of the lists, small gaps closed.
std::vector<Span> together(const std::vector<Spans>& lists) {
  std::vector<Span> all;
  for (const Spans& spans : lists) all.insert(all.end(), spans.begin(), spans.end());
  if (lists.size() > 1)
    std::sort(all.begin(), all.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  size_t last = 0;
  for (size_t i = 1; i < all.size(); ++i)
    if (all[i].begin <= all[last].end + kBridged)
      all[last].end = std::max(all[last].end, all[i].end);
    else
      all[++last] = all[i];
  all.resize(std::min(all.size(), last + 1));
  return all;
}

// Splits start at multiples of their size, so that they do not depend on what else is seen. There is one at
// least: someone must write the results.
std::vector<Slice> slices_of(const std::vector<Span>& seen) {
  std::vector<Slice> slices;
  for (size_t i = 0; i < seen.size(); ++i)
    for (int64_t at = seen[i].begin; at < seen[i].end;) {
      const int64_t border = (at / kSplitKeys + 1) * kSplitKeys, end = std::min(border, seen[i].end);
      if (!slices.empty() && slices.back().begin / kSplitKeys == at / kSplitKeys)
        slices.back().end = end, ++slices.back().n_seen;
      else
        slices.push_back({at, end, static_cast<int64_t>(i), 1});
      at = end;
    }
  if (slices.empty()) slices.push_back({0, 0, 0, 0});
  return slices;
}

class Decode : Pass {
 public:
  Decode(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt)
      : Pass(spec, call, code, interrupt), kernels_(kernels().decode[spec.dtype]),
        step_(spec.Lq == 1 && !finder_.dilation_varies() ? finder_.dilation(0) : 1) {
    look();
    first_split_.push_back(0);
    for (int64_t set = 0; set < spec.B * spec.Hkv; ++set)
      first_split_.push_back(first_split_.back() + static_cast<int64_t>(seen_by(set).slices.size()));
  }

  int64_t splits() const { return first_split_.back(); }

  int workers() const {
    const double rows = static_cast<double>(spec_.Hq / spec_.Hkv * spec_.Lq * (spec_.D + spec_.Dv));
    double work = 0;
    for (int64_t set = 0; set < spec_.B * spec_.Hkv && work < kInlineWork; ++set)
      for (const Slice& s : seen_by(set).slices) work += rows * static_cast<double>(s.end - s.begin);
    return work < kInlineWork ? 1 : static_cast<int>(std::min<int64_t>(threads(), splits()));
  }

  // Of one thread; the partials of all splits belong to the calling one.
  int64_t scratch_bytes() const { return kernels_.scratch_bytes(spec_); }
  int64_t partials_bytes() const { return splits() * kernels_.partial_bytes(spec_); }

  Outcome run() {
    const int count = workers();
    for (int i = 0; i < count; ++i) scratch_.push_back(scratch(i, scratch_bytes()));
    partials_ = static_cast<char*>(scratch(count, partials_bytes()));
    left_ = std::vector<std::atomic<int64_t>>(spec_.B * spec_.Hkv);
    for (size_t set = 0; set < left_.size(); ++set) left_[set] = first_split_[set + 1] - first_split_[set];
    each_task(count, splits(), stopper_, [&](int64_t i, int worker) {
      if (!Stopper::ask(&stopper_)) split(i, scratch_[worker]);
    });
    return wrong_page_ ? Outcome::kWrongPage : stopper_.outcome();
  }

 private:
  // A set is the rows of one group of heads of one sample. Sets whose mask is the same share what they see.
  const Seen& seen_by(int64_t set) const {
    const int64_t batch = finder_.varies_by_batch() ? set / spec_.Hkv : 0,
                  head = finder_.varies_by_head() ? set % spec_.Hkv : 0;
    return seen_[batch * (finder_.varies_by_head() ? spec_.Hkv : 1) + head];
  }

  void look() {
    const int64_t samples = finder_.varies_by_batch() ? spec_.B : 1;
    const int64_t groups = finder_.varies_by_head() ? spec_.Hkv : 1,
                  heads = finder_.varies_by_head() ? group() : 1;
    seen_.resize(samples * groups);
    for (size_t i = 0; i < seen_.size(); ++i) {
      const int64_t batch = static_cast<int64_t>(i) / groups, head = static_cast<int64_t>(i) % groups * heads;
      Seen& s = seen_[i];
      s.spans.resize(heads);
      for (int64_t h = 0; h < heads; ++h) {
        finder_.find({batch, head + h, 0, step_, static_cast<int>(spec_.Lq)}, s.spans[h]);
        s.lists.push_back({s.spans[h].data(), static_cast<int64_t>(s.spans[h].size())});
      }
      s.key = finder_.first_key({batch, head, 0, step_, 1});
      s.seen = together(s.spans);
      s.slices = slices_of(s.seen);
    }
  }

  Split split_of(int64_t set, void* room) const {
    const Seen& s = seen_by(set);
    Split p{};
    p.spec = &spec_, p.call = &call_;
    p.batch = set / spec_.Hkv, p.kv_head = set % spec_.Hkv;
    p.key = s.key, p.key_step = step_;
    p.spans = s.lists.data(), p.by_head = finder_.varies_by_head();
    p.scratch = room;
    return p;
  }

  void* partial(int64_t index) const { return partials_ + index * kernels_.partial_bytes(spec_); }

  // Whoever does a set's last split puts its partials together.
  void split(int64_t index, void* room) {
    const auto after = std::upper_bound(first_split_.begin(), first_split_.end(), index);
    const int64_t set = after - first_split_.begin() - 1;
    const Seen& s = seen_by(set);
    const Slice& slice = s.slices[index - first_split_[set]];
    Split p = split_of(set, room);
    p.begin = slice.begin, p.end = slice.end;
    p.seen = s.seen.data() + slice.first_seen, p.n_seen = slice.n_seen;
    p.partial = partial(index);
    if (!kernels_.split(p)) return wrong_page_.store(true);
    if (left_[set].fetch_sub(1) > 1) return;
    p.partial = partial(first_split_[set]);
    p.n_partials = first_split_[set + 1] - first_split_[set];
    if (!kernels_.finish(p)) wrong_page_ = true;
  }

  const DecodeKernels& kernels_;
  int64_t step_;
  std::vector<Seen> seen_;
  std::vector<int64_t> first_split_;  // of each set
  std::vector<void*> scratch_;
  char* partials_ = nullptr;
  std::vector<std::atomic<int64_t>> left_;  // splits of each set that are not done
  std::atomic<bool> wrong_page_{false};
};

}  // namespace

// The panels of the other kernel hold rows of one head, so few rows leave lanes empty; here rows of a group's
// heads lie side by side. What is not dense would have to be gathered first for the other kernel.
bool decodes(const Spec& spec) {
  const bool dense = spec.store == kFloats && !spec.page;
  const int64_t filled = ceil_div(spec.Lq, kRows) * kRows;
  return spec.Lq <= kMaxPanel && (!dense || spec.Lq <= kRows || 4 * spec.Lq < 3 * filled);
}

Outcome decode(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt) {
  if (is_empty(spec)) return Outcome::kDone;
  return Decode(spec, call, code, interrupt).run();
}

Cut cut_decode(const Spec& spec, const Call& call, const Ints& code) {
  const Decode d(spec, call, code, {});
  return {d.splits(), d.scratch_bytes() + d.partials_bytes() / d.workers(), d.workers()};
}

}  // namespace regard
