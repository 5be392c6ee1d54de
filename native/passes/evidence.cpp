#include "passes/evidence.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "machine/cpu.h"
#include "machine/parallel.h"
#include "mask/spans.h"

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
  std::vector<Runs> runs;
  std::vector<Panel> panels;
};

// Rows are cut into strips that hold whole blocks of the pyramids; every kChunks-th strip of a head is a
// chunk. Sums of chunks are added in order, so that threads change nothing.
class Evidence {
 public:
  Evidence(const Spec& spec, const Call& call, const Facts& facts, const std::vector<int64_t>& code,
           Interrupt interrupt)
      : spec_(spec), call_(call), facts_(facts), spans_(code, spec, call),
        kernels_(kernels().evidence[spec.dtype]), stopper_(interrupt) {
    panel_ = panel_rows(spec.dtype);
    const bool narrow = spec.dtype == kBFloat16 || spec.dtype == kFloat16;
    const bool dilated = spans_.dilation_varies() || spans_.dilation(0) > 1;
    copy_k_ = narrow || dilated || spec.k.d != 1 || spec.k.l != spec.D;
    for (int64_t h = 0; h < spec.Hq; ++h) chunks_ = std::max(chunks_, std::min(kChunks, strips(h)));
    sums_ = (facts.column_mass ? spec.Lk : 0) + (facts.histogram ? facts.distances : 0);
    ready_.resize(chunks());
    done_.resize(chunks());
    merged_.resize(spec.B * spec.Hq);
  }

  Outcome run() {
    workers_.resize(workers());
    const int64_t bytes = kernels_.scratch_bytes(spec_, facts_, kPanels, copy_k_);
    for (size_t i = 0; i < workers_.size(); ++i)
      if (!(workers_[i].scratch = scratch(static_cast<int>(i), bytes))) return Outcome::kOutOfMemory;
    parallel(static_cast<int>(workers_.size()), work, this);
    return stopper_.outcome();
  }

 private:
  int64_t chunks() const { return spec_.B * spec_.Hq * chunks_; }

  int64_t strip_rows(int64_t head) const {
    const int64_t rows =
        std::min(kPanels * panel_ * spans_.dilation(head), std::max(kMostRows, kPanels * panel_));
    return facts_.block ? ceil_div(rows, facts_.block) * facts_.block : rows;
  }
  int64_t strips(int64_t head) const { return ceil_div(spec_.Lq, strip_rows(head)); }

  int workers() const {
    const double pairs = static_cast<double>(spec_.B * spec_.Hq * spec_.Lq) * static_cast<double>(spec_.Lk);
    if (4 * pairs * static_cast<double>(spec_.D) < kInlineWork) return 1;
    return static_cast<int>(std::min<int64_t>(threads(), chunks()));
  }

  static void work(int worker, void* self) {
    Evidence& e = *static_cast<Evidence*>(self);
    ++e.busy_;
    try {
      for (int64_t i; (i = e.next_.fetch_add(1)) < e.chunks() && !e.stopper_.stopped();)
        e.chunk(i, e.workers_[worker]);
    } catch (...) {  // only memory can run out here
      e.stopper_.out_of_memory();
    }
    --e.busy_;
    e.stopper_.watch(e.busy_);
  }

  void chunk(int64_t index, Worker& w) {
    const int64_t head = index / chunks_ % spec_.Hq, batch = index / chunks_ / spec_.Hq;
    Sums sums = empty_sums();
    for (int64_t s = index % chunks_; s < strips(head) && !stopper_.stopped(); s += chunks_) {
      const int64_t first = s * strip_rows(head), end = std::min(spec_.Lq, first + strip_rows(head));
      for (int64_t c = 0; c < spans_.dilation(head) && first + c < end; ++c)
        strip(batch, head, first + c, end, sums, w);
    }
    merge(index, std::move(sums));
  }

  // Rows first, first + step, ... of a strip, a few panels at a time.
  void strip(int64_t batch, int64_t head, int64_t first, int64_t end, Sums& sums, Worker& w) {
    const int64_t step = spans_.dilation(head);
    while (first < end && !stopper_.stopped()) {
      w.panels.clear();
      w.runs.resize(kPanels);
      for (; w.panels.size() < kPanels && first < end; first += panel_ * step) {
        const int rows = static_cast<int>(std::min<int64_t>(panel_, ceil_div(end - first, step)));
        if (only_rows(facts_) && !asked_for(first, first + (rows - 1) * step)) continue;
        Runs& runs = w.runs[w.panels.size()];
        spans_.find({batch, head, first, step, rows}, runs);
        w.panels.push_back({head, first, rows, runs.data(), static_cast<int64_t>(runs.size())});
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
    Look l{};
    l.task.spec = &spec_;
    l.task.call = &call_;
    l.task.batch = batch;
    l.task.kv_head = head / (spec_.Hq / spec_.Hkv);
    l.task.row_step = l.task.key_step = step;
    l.task.key = spans_.first_key({batch, head, w.panels[0].row, step, 1});
    l.task.panels = w.panels.data();
    l.task.n_panels = static_cast<int>(w.panels.size());
    l.task.copy_k = copy_k_;
    l.task.scratch = w.scratch;
    l.task.stop = Stopper::ask;
    l.task.stop_context = &stopper_;
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

  const Spec& spec_;
  const Call& call_;
  const Facts& facts_;
  Spans spans_;
  const EvidenceKernels& kernels_;
  int panel_;
  bool copy_k_;
  int64_t chunks_ = 0, sums_;
  std::vector<Worker> workers_;
  std::vector<Sums> ready_, spare_;
  std::vector<int64_t> merged_;  // of each head, chunks that have been added
  std::vector<char> done_;       // chunks whose sums are ready
  std::mutex mutex_;
  Stopper stopper_;
  std::atomic<int64_t> next_{0}, busy_{0};
};

}  // namespace

Outcome evidence(const Spec& spec, const Call& call, const Facts& facts, const std::vector<int64_t>& code,
                 Interrupt interrupt) {
  if (spec.B * spec.Hq * spec.Lq == 0) return Outcome::kDone;
  return Evidence(spec, call, facts, code, interrupt).run();
}

}  // namespace regard
