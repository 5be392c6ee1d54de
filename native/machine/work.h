// Shared by the passes: a task loop that can be interrupted, and scratch memory that outlives a call.
#pragma once
#include <pthread.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>

#include "machine/parallel.h"

namespace regard {

enum class Outcome { kDone, kInterrupted, kOutOfMemory, kWrongPage };

struct Interrupt {
  bool (*pending)();  // returns whether to stop; the calling thread polls it a few times a second
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tells running tasks to stop. Only the calling thread polls, because only it may check Python's signals.
class Stopper {
 public:
  explicit Stopper(Interrupt interrupt);
  // Returns whether tasks must stop. `self` is a Stopper: kernels call this through a C function pointer.
  static bool poll(void* self);
  // On the calling thread, polls until no worker is running: another worker's last task may take seconds.
  void poll_until_idle(const std::atomic<int64_t>& running);
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  void out_of_memory();
  Outcome outcome() const;

 private:
  Interrupt interrupt_;
  pthread_t caller_ = pthread_self();
  int64_t last_poll_;  // milliseconds
  std::atomic<bool> stopped_{false}, out_of_memory_{false};
};

// Calls job(index, worker) for each index in [0, count) on up to `workers` threads. Jobs start in
// ascending order of index.
template <class Job>
void run_tasks(int workers, int64_t count, Stopper& stopper, Job job) {
  struct Shared {
    Job& job;
    int64_t count;
    Stopper& stopper;
    std::atomic<int64_t> next{0}, running{0};
  } shared{job, count, stopper};
  const auto work = [](int worker, void* context) {
    Shared& s = *static_cast<Shared*>(context);
    ++s.running;
    try {
      for (int64_t i; (i = s.next.fetch_add(1)) < s.count && !s.stopper.stopped();) s.job(i, worker);
    } catch (...) {  // jobs throw nothing but std::bad_alloc
      s.stopper.out_of_memory();
    }
    --s.running;
    s.stopper.poll_until_idle(s.running);
  };
  parallel(static_cast<int>(std::min<int64_t>(workers, count)), work, &shared);
}

// Returns at least `bytes` of scratch memory for worker `worker` of the calling thread, or throws
// std::bad_alloc. Later calls reuse the memory: page faults would take longer than a small call.
void* scratch(size_t worker, int64_t bytes);

// Requests 2 MB pages for a large new output, which saves tens of milliseconds of page faults.
void advise_huge_pages(void* data, int64_t bytes);

}  // namespace regard
