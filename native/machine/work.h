// What the passes share: memory of a thread that outlives a call, and a way to end one early.
#pragma once
#include <pthread.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>

#include "machine/parallel.h"

namespace regard {

enum class Outcome { kDone, kInterrupted, kOutOfMemory, kWrongPage };

struct Interrupt {
  bool (*pending)();  // asked by the calling thread a few times a second
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tells running tasks to stop. Only the calling thread may ask Python for signals.
class Stopper {
 public:
  explicit Stopper(Interrupt interrupt);
  static bool ask(void* self);
  // The calling thread, out of work, goes on asking until nobody is busy: a last task may take seconds.
  void watch(const std::atomic<int64_t>& busy);
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  void out_of_memory();
  Outcome outcome() const;

 private:
  Interrupt interrupt_;
  pthread_t caller_ = pthread_self();
  int64_t asked_;
  std::atomic<bool> stopped_{false}, out_of_memory_{false};
};

// Calls job(index, worker) for index = 0 .. count - 1 on up to `workers` threads, in order of start.
template <class Job>
void each_task(int workers, int64_t count, Stopper& stopper, Job job) {
  struct Shared {
    Job& job;
    int64_t count;
    Stopper& stopper;
    std::atomic<int64_t> next{0}, busy{0};
  } shared{job, count, stopper};
  const auto work = [](int worker, void* context) {
    Shared& s = *static_cast<Shared*>(context);
    ++s.busy;
    try {
      for (int64_t i; (i = s.next.fetch_add(1)) < s.count && !s.stopper.stopped();) s.job(i, worker);
    } catch (...) {  // only memory can run out here
      s.stopper.out_of_memory();
    }
    --s.busy;
    s.stopper.watch(s.busy);
  };
  parallel(static_cast<int>(std::min<int64_t>(workers, count)), work, &shared);
}

// Working memory of the calling thread's `worker`-th helper, at least `bytes`; throws std::bad_alloc.
// Kept from call to call: fresh pages would cost more than a small call itself.
void* scratch(size_t worker, int64_t bytes);

// A large result is mostly fresh pages; taking them 2 MB at a time saves the kernel tens of milliseconds.
void ask_for_large_pages(void* data, int64_t bytes);

}  // namespace regard
