#include <algorithm>
#include <mutex>

#include "passes/pass.h"

namespace regard {
namespace {

constexpr int64_t kPanels = 16;          // panels that share one pass over the keys
constexpr int64_t kTasksPerHead = 16;    // max. number of tasks; each task has its own sums
constexpr int64_t kMaxChunkRows = 4096;  // limit for dilated masks, whose panels spread over many rows
constexpr double kInlineWork = 1e6;      // floating point operations: below this, one thread is faster

// Sums over the rows of a task: the mass of each key, then the mass of each distance.
using Sums = std::vector<double>;

// A thread's buffers, which its tasks reuse.
struct Worker {
  void* scratch = nullptr;
  std::vector<Spans> spans;
  std::vector<Panel> panels;
};

// A head's rows are divided into chunks, which hold whole blocks of `block_mass`. A task takes every n-th
// chunk of a head, n = tasks_per_head_. Sums of tasks are added in order, so that threads do not change
// results.
class Evidence : Pass {
 public:
  Evidence(const Spec& spec, const Call& call, const Facts& facts, const Ints& code, Interrupt interrupt)
      : Pass(spec, call, code, interrupt), facts_(facts), kernels_(*kernels().evidence[spec.dtype]) {
    panel_ = panel_rows(spec.dtype);
    copy_k_ = must_convert(call.k, spec.k, spec.D) || is_dilated() || spec.k.d != 1 || spec.k.l != spec.D;
    for (int64_t h = 0; h < spec.Hq; ++h)
      tasks_per_head_ = std::max(tasks_per_head_, std::min(kTasksPerHead, chunks(h)));
    sum_count_ = (facts.column_mass ? spec.Lk : 0) + (facts.histogram ? facts.distances : 0);
    finished_sums_.resize(tasks());
    finished_.resize(tasks());
    merged_.resize(spec.B * spec.Hq);
  }

  Outcome run() {
    workers_.resize(workers());
    const int64_t bytes = kernels_.scratch_bytes(spec_, facts_, kPanels, copy_k_);
    for (size_t i = 0; i < workers_.size(); ++i) workers_[i].scratch = scratch(i, bytes);
    run_tasks(workers(), tasks(), stopper_, [&](int64_t i, int worker) { run_task(i, workers_[worker]); });
    return stopper_.outcome();
  }

 private:
  int64_t tasks() const { return spec_.B * spec_.Hq * tasks_per_head_; }

  int64_t chunk_rows(int64_t head) const {
    const int64_t rows =
        std::min(kPanels * panel_ * finder_.dilation(head), std::max(kMaxChunkRows, kPanels * panel_));
    return facts_.block ? ceil_div(rows, facts_.block) * facts_.block : rows;
  }
  int64_t chunks(int64_t head) const { return ceil_div(spec_.Lq, chunk_rows(head)); }

  int workers() const {
    const double pairs = static_cast<double>(spec_.B * spec_.Hq * spec_.Lq) * static_cast<double>(spec_.Lk);
    if (4 * pairs * static_cast<double>(spec_.D) < kInlineWork) return 1;
    return static_cast<int>(std::min<int64_t>(threads(), tasks()));
  }

  void run_task(int64_t index, Worker& w) {
    const int64_t head = index / tasks_per_head_ % spec_.Hq, batch = index / tasks_per_head_ / spec_.Hq;
    Sums sums = zero_sums();
    for (int64_t i = index % tasks_per_head_; i < chunks(head) && !stopper_.stopped(); i += tasks_per_head_) {
      const int64_t first = i * chunk_rows(head), end = std::min(spec_.Lq, first + chunk_rows(head));
      for (int64_t c = 0; c < finder_.dilation(head) && first + c < end; ++c)
        run_chunk(batch, head, first + c, end, sums, w);
    }
    finish(index, std::move(sums));
  }

  // Processes rows first, first + step, ... of a chunk, kPanels panels at a time.
  void run_chunk(int64_t batch, int64_t head, int64_t first, int64_t end, Sums& sums, Worker& w) {
    const int64_t step = finder_.dilation(head);
    while (first < end && !stopper_.stopped()) {
      w.panels.clear();
      w.spans.resize(kPanels);
      for (; w.panels.size() < kPanels && first < end; first += panel_ * step) {
        const int rows = static_cast<int>(std::min<int64_t>(panel_, ceil_div(end - first, step)));
        if (only_rows(facts_) && !any_requested(first, first + (rows - 1) * step)) continue;
        Spans& spans = w.spans[w.panels.size()];
        find_spans({batch, head, first, step, rows}, spans);
        w.panels.push_back({head, first, rows, spans.data(), static_cast<int64_t>(spans.size())});
      }
      if (!w.panels.empty()) compute(batch, head, step, sums, w);
    }
  }

  // Returns whether the weights of a row in [first, last] are requested.
  bool any_requested(int64_t first, int64_t last) const {
    const int64_t* end = facts_.rows + facts_.n_rows;
    const int64_t* row = std::lower_bound(facts_.rows, end, first);
    return row < end && *row <= last;
  }

  void compute(int64_t batch, int64_t head, int64_t step, Sums& sums, Worker& w) {
    EvidenceTask e{};
    e.task = task(batch, head, w.panels[0].row, step, w.panels, w.scratch);
    e.task.copy_k = copy_k_;
    e.facts = &facts_;
    e.column_mass = sums.data();
    e.histogram = sums.data() + (facts_.column_mass ? spec_.Lk : 0);
    kernels_.run(e);
  }

  // Returns sums that are all zero. Reuses the memory of a finished task's sums if there is any.
  Sums zero_sums() {
    Sums sums;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_sums_.empty()) {
      sums = std::move(free_sums_.back());
      free_sums_.pop_back();
    }
    sums.assign(sum_count_, 0.0);
    return sums;
  }

  // Stores the task's sums, then adds the sums of its head that are next in the order of tasks.
  void finish(int64_t index, Sums&& sums) {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_sums_[index] = std::move(sums);
    finished_[index] = true;
    const int64_t head = index / tasks_per_head_;
    for (int64_t& i = merged_[head]; i < tasks_per_head_ && finished_[head * tasks_per_head_ + i]; ++i) {
      Sums& next = finished_sums_[head * tasks_per_head_ + i];
      add(next.data(), facts_.column_mass, head, spec_.Lk);
      add(next.data() + (facts_.column_mass ? spec_.Lk : 0), facts_.histogram, head, facts_.distances);
      free_sums_.push_back(std::move(next));
    }
  }

  static void add(const double* sums, double* total, int64_t head, int64_t count) {
    for (int64_t i = 0; total && i < count; ++i) total[head * count + i] += sums[i];
  }

  const Facts& facts_;
  const EvidenceKernels& kernels_;
  int panel_;
  bool copy_k_;
  int64_t tasks_per_head_ = 0, sum_count_;
  std::vector<Worker> workers_;
  std::vector<Sums> finished_sums_, free_sums_;
  std::vector<int64_t> merged_;  // of each head, the number of tasks whose sums have been added
  std::vector<char> finished_;   // whether a task's sums are in finished_sums_
  std::mutex mutex_;
};

}  // namespace

Outcome evidence(const Spec& spec, const Call& call, const Facts& facts, const Ints& code,
                 Interrupt interrupt) {
  if (is_empty(spec)) return Outcome::kDone;
  return Evidence(spec, call, facts, code, interrupt).run();
}

}  // namespace regard
