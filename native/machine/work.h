// What the passes share: memory of a thread that outlives a call, and a way to end one early.
#pragma once
#include <pthread.h>
#include <stdint.h>

#include <atomic>

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

// Working memory of the calling thread's `worker`-th helper, at least `bytes`; null when there is none.
// Kept from call to call: fresh pages would cost more than a small call itself.
void* scratch(int worker, int64_t bytes);

// A large result is mostly fresh pages; taking them 2 MB at a time saves the kernel tens of milliseconds.
void ask_for_large_pages(void* data, int64_t bytes);

}  // namespace regard
