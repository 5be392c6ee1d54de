#include <algorithm>

#include "passes/pass.h"

namespace regard {
namespace {

constexpr int64_t kMaxGap = 8;  // masked keys between two spans that are computed rather than skipped
constexpr int64_t kPanelRows = 16;
constexpr double kInlineWork = 5e5;  // multiplications: below this, one thread is faster

// Keys [begin, end) of a split, and which spans of GroupSpans::any_row overlap them.
struct Slice {
  int64_t begin, end, first_span, n_spans;
};

// The spans of a group (the query heads of one sample that share a key head). Groups with the same mask
// share one GroupSpans.
struct GroupSpans {
  int64_t first_key;
  std::vector<Spans> spans;     // one list for each head, or one for all if the mask is the same
  std::vector<SpanList> lists;  // `spans`, as kernels take them
  std::vector<Span> any_row;    // the union of `spans` over rows and heads
  std::vector<Slice> slices;    // one for each split
};

// Returns the union of the lists over rows and heads, with gaps of up to kMaxGap keys closed.
std::vector<Span> union_of(const std::vector<Spans>& lists) {
  std::vector<Span> merged;
  for (const Spans& spans : lists) merged.insert(merged.end(), spans.begin(), spans.end());
  if (lists.size() > 1)
    std::sort(merged.begin(), merged.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  size_t last = 0;
  for (size_t i = 1; i < merged.size(); ++i)
    if (merged[i].begin <= merged[last].end + kMaxGap)
      merged[last].end = std::max(merged[last].end, merged[i].end);
    else
      merged[++last] = merged[i];
  merged.resize(std::min(merged.size(), last + 1));
  return merged;
}

// Cuts the keys at multiples of kSplitKeys, so that the result of a row does not depend on the keys
// that other rows attend to. Returns at least one slice, because the thread that finishes the last
// split of a group writes the group's results.
std::vector<Slice> slices_of(const std::vector<Span>& spans) {
  std::vector<Slice> slices;
  for (size_t i = 0; i < spans.size(); ++i)
    for (int64_t key = spans[i].begin; key < spans[i].end;) {
      const int64_t limit = (key / kSplitKeys + 1) * kSplitKeys, end = std::min(limit, spans[i].end);
      if (!slices.empty() && slices.back().begin / kSplitKeys == key / kSplitKeys)
        slices.back().end = end, ++slices.back().n_spans;
      else
        slices.push_back({key, end, static_cast<int64_t>(i), 1});
      key = end;
    }
  if (slices.empty()) slices.push_back({0, 0, 0, 0});
  return slices;
}

class Decode : Pass {
 public:
  Decode(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt)
      : Pass(spec, call, code, interrupt), kernels_(*kernels().decode[spec.dtype]),
        step_(spec.Lq == 1 && !finder_.dilation_varies() ? finder_.dilation(0) : 1) {
    find_all_spans();
    first_split_.push_back(0);
    for (int64_t group = 0; group < spec.B * spec.Hkv; ++group)
      first_split_.push_back(first_split_.back() + static_cast<int64_t>(spans_of(group).slices.size()));
  }

  Outcome outcome() const { return stopper_.outcome(); }
  int64_t splits() const { return first_split_.back(); }

  int workers() const {
    const double rows = static_cast<double>(spec_.Hq / spec_.Hkv * spec_.Lq * (spec_.D + spec_.Dv));
    double work = 0;
    for (int64_t group = 0; group < spec_.B * spec_.Hkv && work < kInlineWork; ++group)
      for (const Slice& s : spans_of(group).slices) work += rows * static_cast<double>(s.end - s.begin);
    return work < kInlineWork ? 1 : static_cast<int>(std::min<int64_t>(threads(), splits()));
  }

  // Scratch of one thread. The partial results of all splits are a separate buffer.
  int64_t scratch_bytes() const { return kernels_.scratch_bytes(spec_); }
  int64_t partials_bytes() const { return splits() * kernels_.partial_bytes(spec_); }

  Outcome run() {
    const int count = workers();
    for (int i = 0; i < count; ++i) scratch_.push_back(scratch(i, scratch_bytes()));
    partials_ = static_cast<char*>(scratch(count, partials_bytes()));
    pending_ = std::vector<std::atomic<int64_t>>(spec_.B * spec_.Hkv);
    for (size_t g = 0; g < pending_.size(); ++g) pending_[g] = first_split_[g + 1] - first_split_[g];
    run_tasks(count, splits(), stopper_, [&](int64_t i, int worker) {
      if (!Stopper::poll(&stopper_)) run_split(i, scratch_[worker]);
    });
    return wrong_page_ ? Outcome::kWrongPage : outcome();
  }

 private:
  const GroupSpans& spans_of(int64_t group) const {
    const int64_t batch = finder_.varies_by_batch() ? group / spec_.Hkv : 0,
                  head = finder_.varies_by_head() ? group % spec_.Hkv : 0;
    return group_spans_[batch * (finder_.varies_by_head() ? spec_.Hkv : 1) + head];
  }

  void find_all_spans() {
    const int64_t samples = finder_.varies_by_batch() ? spec_.B : 1;
    const int64_t groups = finder_.varies_by_head() ? spec_.Hkv : 1,
                  heads = finder_.varies_by_head() ? group() : 1;
    group_spans_.resize(samples * groups);
    for (size_t i = 0; i < group_spans_.size(); ++i) {
      const int64_t batch = static_cast<int64_t>(i) / groups, head = static_cast<int64_t>(i) % groups * heads;
      GroupSpans& s = group_spans_[i];
      s.spans.resize(heads);
      for (int64_t h = 0; h < heads; ++h) {
        find_spans({batch, head + h, 0, step_, static_cast<int>(spec_.Lq)}, s.spans[h]);
        s.lists.push_back({s.spans[h].data(), static_cast<int64_t>(s.spans[h].size())});
      }
      s.first_key = finder_.first_key({batch, head, 0, step_, 1});
      s.any_row = union_of(s.spans);
      s.slices = slices_of(s.any_row);
    }
  }

  Split split_of(int64_t group, void* scratch) const {
    const GroupSpans& s = spans_of(group);
    Split split{};
    split.spec = &spec_, split.call = &call_;
    split.batch = group / spec_.Hkv, split.kv_head = group % spec_.Hkv;
    split.key = s.first_key, split.key_step = step_;
    split.spans = s.lists.data(), split.by_head = finder_.varies_by_head();
    split.scratch = scratch;
    return split;
  }

  void* partial(int64_t index) const { return partials_ + index * kernels_.partial_bytes(spec_); }

  // Computes one split. The thread that finishes a group's last split merges the group's partial results.
  void run_split(int64_t index, void* scratch) {
    const auto next_group = std::upper_bound(first_split_.begin(), first_split_.end(), index);
    const int64_t group = next_group - first_split_.begin() - 1;
    const GroupSpans& s = spans_of(group);
    const Slice& slice = s.slices[index - first_split_[group]];
    Split split = split_of(group, scratch);
    split.begin = slice.begin, split.end = slice.end;
    split.any_row = s.any_row.data() + slice.first_span, split.n_any_row = slice.n_spans;
    split.partial = partial(index);
    if (!kernels_.split(split)) return wrong_page_.store(true);
    if (pending_[group].fetch_sub(1) > 1) return;
    split.partial = partial(first_split_[group]);
    split.n_partials = first_split_[group + 1] - first_split_[group];
    if (!kernels_.finish(split)) wrong_page_ = true;
  }

  const DecodeKernels& kernels_;
  int64_t step_;
  std::vector<GroupSpans> group_spans_;
  std::vector<int64_t> first_split_;  // the first split of each group, then the number of splits
  std::vector<void*> scratch_;
  char* partials_ = nullptr;
  std::vector<std::atomic<int64_t>> pending_;  // splits of each group that are still to be computed
  std::atomic<bool> wrong_page_{false};
};

}  // namespace

// Forward's panels hold rows of one head, so a few rows leave lanes empty; decode puts the rows of a group's
// heads side by side. Forward also needs a dequantised or gathered copy of quantised or paged keys.
bool decodes(const Spec& spec) {
  const bool unpaged_floats = spec.store == kFloats && !spec.page;
  const int64_t panel_lanes = ceil_div(spec.Lq, kPanelRows) * kPanelRows;
  return spec.Lq <= kMaxPanel && (!unpaged_floats || spec.Lq <= kPanelRows || 4 * spec.Lq < 3 * panel_lanes);
}

Outcome decode(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt) {
  if (is_empty(spec)) return Outcome::kDone;
  return Decode(spec, call, code, interrupt).run();
}

Outcome plan_decode(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt,
                    TaskPlan& plan) {
  const Decode pass(spec, call, code, interrupt);
  plan = {pass.splits(), pass.scratch_bytes() + pass.partials_bytes() / pass.workers(), pass.workers()};
  return pass.outcome();
}

}  // namespace regard
