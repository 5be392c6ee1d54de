#include <algorithm>
#include <mutex>

#include "passes/pass.h"

namespace regard {
namespace {

constexpr int64_t kPanels = 16;      // that walk over the keys together
constexpr int64_t kChunks = 16;      // of a head: what one thread does, with sums of its own
constexpr int64_t kMostRows = 4096;  // of a strip, where rows far apart make a panel
constexpr double kInlineWork = 1e6;  // floating point operations that are not worth a second thread

// Sums over the rows of a chunk: what keys get, then what distances get.
using Sums = std::vector<double>;

// What a thread keeps between panels.
struct Worker {
  void* scratch = nullptr;
  std::vector<Spans> spans;
  std::vector<Panel> panels;
};

// Rows are cut into strips that hold whole blocks of the pyramids; every kChunks-th strip of a head is a
// chunk. Sums of chunks are added in order, so that threads change nothing.
class Evidence : Pass {
 public:
  Evidence(const Spec& spec, const Call& call, const Facts& facts, const Ints& code, Interrupt interrupt)
      : Pass(spec, call, code, interrupt), facts_(facts), kernels_(kernels().evidence[spec.dtype]) {
    panel_ = panel_rows(spec.dtype);
    copy_k_ = narrow() || dilated() || spec.k.d != 1 || spec.k.l != spec.D;
    for (int64_t h = 0; h < spec.Hq; ++h) chunks_ = std::max(chunks_, std::min(kChunks, strips(h)));
    sums_ = (facts.column_mass ? spec.Lk : 0) + (facts.histogram ? facts.distances : 0);
    ready_.resize(chunks());
    done_.resize(chunks());
    merged_.resize(spec.B * spec.Hq);
  }

  Outcome run() {
    workers_.resize(workers());
    const int64_t bytes = kernels_.scratch_bytes(spec_, facts_, kPanels, copy_k_);
    for (size_t i = 0; i < workers_.size(); ++i) workers_[i].scratch = scratch(i, bytes);
    each_task(workers(), chunks(), stopper_, [&](int64_t i, int worker) { chunk(i, workers_[worker]); });
    return stopper_.outcome();
  }

 private:
  int64_t chunks() const { return spec_.B * spec_.Hq * chunks_; }

  int64_t strip_rows(int64_t head) const {
    const int64_t rows =
        std::min(kPanels * panel_ * finder_.dilation(head), std::max(kMostRows, kPanels * panel_));
    return facts_.block ? ceil_div(rows, facts_.block) * facts_.block : rows;
  }
  int64_t strips(int64_t head) const { return ceil_div(spec_.Lq, strip_rows(head)); }

  int workers() const {
    const double pairs = static_cast<double>(spec_.B * spec_.Hq * spec_.Lq) * static_cast<double>(spec_.Lk);
    if (4 * pairs * static_cast<double>(spec_.D) < kInlineWork) return 1;
    return static_cast<int>(std::min<int64_t>(threads(), chunks()));
  }

  void chunk(int64_t index, Worker& w) {
    const int64_t head = index / chunks_ % spec_.Hq, batch = index / chunks_ / spec_.Hq;
    Sums sums = empty_sums();
    for (int64_t s = index % chunks_; s < strips(head) && !stopper_.stopped(); s += chunks_) {
      const int64_t first = s * strip_rows(head), end = std::min(spec_.Lq, first + strip_rows(head));
      for (int64_t c = 0; c < finder_.dilation(head) && first + c < end; ++c)
        strip(batch, head, first + c, end, sums, w);
    }
    merge(index, std::move(sums));
  }

  // Rows first, first + step, ... of a strip, a few panels at a time.
  void strip(int64_t batch, int64_t head, int64_t first, int64_t end, Sums& sums, Worker& w) {
    const int64_t step = finder_.dilation(head);
    while (first < end && !stopper_.stopped()) {
      w.panels.clear();
      w.spans.resize(kPanels);
      for (; w.panels.size() < kPanels && first < end; first += panel_ * step) {
        const int rows = static_cast<int>(std::min<int64_t>(panel_, ceil_div(end - first, step)));
        if (only_rows(facts_) && !asked_for(first, first + (rows - 1) * step)) continue;
        Spans& spans = w.spans[w.panels.size()];
        finder_.find({batch, head, first, step, rows}, spans);
        w.panels.push_back({head, first, rows, spans.data(), static_cast<int64_t>(spans.size())});
      }
      if (!w.panels.empty()) look(batch, head, step, sums, w);
    }
  }

  // Whether one of the rows from first to last is to be kept.
  bool asked_for(int64_t first, int64_t last) const {
    const int64_t* end = facts_.rows + facts_.n_rows;
    const int64_t* row = std::lower_bound(facts_.rows, end, first);
    return row < end && *row <= last;
  }

  void look(int64_t batch, int64_t head, int64_t step, Sums& sums, Worker& w) {
    EvidenceTask l{};
    l.task = task(batch, head, w.panels[0].row, step, w.panels, w.scratch);
    l.task.copy_k = copy_k_;
    l.facts = &facts_;
    l.column_mass = sums.data();
    l.histogram = sums.data() + (facts_.column_mass ? spec_.Lk : 0);
    kernels_.look(l);
  }

  Sums empty_sums() {
    Sums sums;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!spare_.empty()) {
      sums = std::move(spare_.back());
      spare_.pop_back();
    }
    sums.assign(sums_, 0.0);
    return sums;
  }

  // Adds all chunks of the head whose turn it is.
  void merge(int64_t index, Sums&& sums) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ready_[index] = std::move(sums);
    done_[index] = true;
    const int64_t head = index / chunks_;
    for (int64_t& c = merged_[head]; c < chunks_ && done_[head * chunks_ + c]; ++c) {
      Sums& turn = ready_[head * chunks_ + c];
      add(turn.data(), facts_.column_mass, head, spec_.Lk);
      add(turn.data() + (facts_.column_mass ? spec_.Lk : 0), facts_.histogram, head, facts_.distances);
      spare_.push_back(std::move(turn));
    }
  }

  static void add(const double* sums, double* total, int64_t head, int64_t count) {
    for (int64_t i = 0; total && i < count; ++i) total[head * count + i] += sums[i];
  }

  const Facts& facts_;
  const EvidenceKernels& kernels_;
  int panel_;
  bool copy_k_;
  int64_t chunks_ = 0, sums_;
  std::vector<Worker> workers_;
  std::vector<Sums> ready_, spare_;
  std::vector<int64_t> merged_;  // of each head, chunks that have been added
  std::vector<char> done_;       // chunks whose sums are ready
  std::mutex mutex_;
};

}  // namespace

Outcome evidence(const Spec& spec, const Call& call, const Facts& facts, const Ints& code,
                 Interrupt interrupt) {
  if (is_empty(spec)) return Outcome::kDone;
  return Evidence(spec, call, facts, code, interrupt).run();
}

}  // namespace regard
