#include <algorithm>

#include "passes/pass.h"

namespace regard {
namespace {

constexpr int64_t kMaxGap = 8;  // masked keys between two spans that are computed rather than skipped
constexpr int64_t kPanelRows = 16;
constexpr int64_t kRunsPerWorker = 4;  // at least, so that threads finish at about the same time
constexpr double kInlineWork = 5e5;    // multiplications: below this, one thread is faster

// The spans of a group (the query heads of one sample that share a key head). Groups with the same mask
// share one GroupSpans.
struct GroupSpans {
  int64_t first_key;
  std::vector<Spans> spans;     // one list for each head, or one for all if the mask is the same
  std::vector<SpanList> lists;  // `spans`, as kernels take them
  std::vector<Span> any_row;    // the union of `spans` over rows and heads
  std::vector<Split> splits;
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
// that other rows attend to. Returns at least one split, because the thread that finishes the last
// run of a group writes the group's results.
std::vector<Split> splits_of(const std::vector<Span>& spans) {
  std::vector<Split> splits;
  for (const Span& span : spans)
    for (int64_t key = span.begin; key < span.end;) {
      const int64_t limit = (key / kSplitKeys + 1) * kSplitKeys, end = std::min(limit, span.end);
      if (!splits.empty() && splits.back().begin / kSplitKeys == key / kSplitKeys)
        splits.back().end = end, ++splits.back().n_any_row;
      else
        splits.push_back({key, end, &span, 1});
      key = end;
    }
  if (splits.empty()) splits.push_back({0, 0, nullptr, 0});
  return splits;
}

class Decode : Pass {
 public:
  Decode(const Spec& spec, const Call& call, const Ints& code, Interrupt interrupt)
      : Pass(spec, call, code, interrupt), kernels_(*kernels().decode[spec.dtype]),
        step_(spec.Lq == 1 && !finder_.dilation_varies() ? finder_.dilation(0) : 1) {
    find_all_spans();
    first_split_.push_back(0);
    for (int64_t group = 0; group < groups(); ++group)
      first_split_.push_back(first_split_.back() + n_splits(group));
    workers_ = choose_workers();
    run_splits_ = std::clamp<int64_t>(splits() / (kRunsPerWorker * workers_), 1, kernels_.max_splits(spec));
    first_run_.push_back(0);
    for (int64_t group = 0; group < groups(); ++group)
      first_run_.push_back(first_run_.back() + ceil_div(n_splits(group), run_splits_));
  }

  Outcome outcome() const { return stopper_.outcome(); }
  int64_t runs() const { return first_run_.back(); }
  int workers() const { return workers_; }

  // Scratch of one thread. The partial results of all splits are a separate buffer.
  int64_t scratch_bytes() const { return kernels_.scratch_bytes(spec_, run_splits_); }
  int64_t partials_bytes() const { return splits() * kernels_.partial_bytes(spec_); }

  Outcome run() {
    for (int i = 0; i < workers_; ++i) scratch_.push_back(scratch(i, scratch_bytes()));
    partials_ = static_cast<char*>(scratch(workers_, partials_bytes()));
    pending_ = std::vector<std::atomic<int64_t>>(groups());
    for (int64_t g = 0; g < groups(); ++g) pending_[g] = first_run_[g + 1] - first_run_[g];
    run_tasks(workers_, runs(), stopper_, [&](int64_t i, int worker) {
      if (!Stopper::poll(&stopper_)) compute_run(i, scratch_[worker]);
    });
    return wrong_page_ ? Outcome::kWrongPage : outcome();
  }

 private:
  int64_t groups() const { return spec_.B * spec_.Hkv; }
  int64_t splits() const { return first_split_.back(); }
  int64_t n_splits(int64_t group) const { return static_cast<int64_t>(spans_of(group).splits.size()); }

  int choose_workers() const {
    const double rows = static_cast<double>(spec_.Hq / spec_.Hkv * spec_.Lq * (spec_.D + spec_.Dv));
    double work = 0;
    for (int64_t group = 0; group < groups() && work < kInlineWork; ++group)
      for (const Split& s : spans_of(group).splits) work += rows * static_cast<double>(s.end - s.begin);
    return work < kInlineWork ? 1 : static_cast<int>(std::min<int64_t>(threads(), splits()));
  }

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
      s.splits = splits_of(s.any_row);
    }
  }

  // Returns a run of up to `count` splits of a group, from split `first` on.
  Run run_of(int64_t group, int64_t first, int64_t count, void* scratch) const {
    const GroupSpans& s = spans_of(group);
    Run run{};
    run.spec = &spec_, run.call = &call_;
    run.batch = group / spec_.Hkv, run.kv_head = group % spec_.Hkv;
    run.key = s.first_key, run.key_step = step_;
    run.spans = s.lists.data(), run.by_head = finder_.varies_by_head();
    run.splits = s.splits.data() + first, run.n_splits = std::min(count, n_splits(group) - first);
    run.partials = partials_ + (first_split_[group] + first) * kernels_.partial_bytes(spec_);
    run.scratch = scratch;
    return run;
  }

  // Computes one run. The thread that finishes a group's last run merges the group's partial results.
  void compute_run(int64_t index, void* scratch) {
    const auto next_group = std::upper_bound(first_run_.begin(), first_run_.end(), index);
    const int64_t group = next_group - first_run_.begin() - 1;
    const Run run = run_of(group, (index - first_run_[group]) * run_splits_, run_splits_, scratch);
    if (!kernels_.run(run)) return wrong_page_.store(true);
    if (pending_[group].fetch_sub(1) > 1) return;
    if (!kernels_.finish(run_of(group, 0, n_splits(group), scratch))) wrong_page_ = true;
  }

  const DecodeKernels& kernels_;
  int64_t step_;
  std::vector<GroupSpans> group_spans_;
  std::vector<int64_t> first_split_;  // the first split of each group, then the number of splits
  int workers_;
  int64_t run_splits_;              // splits of a run
  std::vector<int64_t> first_run_;  // the first run of each group, then the number of runs
  std::vector<void*> scratch_;
  char* partials_ = nullptr;
  std::vector<std::atomic<int64_t>> pending_;  // runs of each group that are still to be computed
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
  plan = {pass.runs(), pass.scratch_bytes() + pass.partials_bytes() / pass.workers(), pass.workers()};
  return pass.outcome();
}

}  // namespace regard
