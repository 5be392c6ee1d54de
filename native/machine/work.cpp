#include "machine/work.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <new>
#include <vector>

namespace regard {
namespace {

int64_t milliseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

// A buffer that only grows.
class Scratch {
 public:
  Scratch() = default;
  Scratch(Scratch&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr, other.bytes_ = 0;
  }
  ~Scratch() { free(data_); }

  void* reserve(int64_t bytes) {
    if (bytes <= bytes_) return data_;
    free(data_);
    bytes_ = ceil_div(bytes, 4096) * 4096;
    if ((data_ = aligned_alloc(4096, bytes_))) return data_;
    bytes_ = 0;
    throw std::bad_alloc();
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

thread_local std::vector<Scratch> worker_scratch;  // indexed by worker, for the calls of this thread

}  // namespace

Stopper::Stopper(Interrupt interrupt) : interrupt_(interrupt), last_poll_(milliseconds()) {}

bool Stopper::poll(void* self) {
  Stopper& s = *static_cast<Stopper*>(self);
  if (s.stopped()) return true;
  if (!pthread_equal(s.caller_, pthread_self())) return false;
  const int64_t now = milliseconds();
  if (now - s.last_poll_ < 50) return false;
  s.last_poll_ = now;
  if (s.interrupt_.pending && s.interrupt_.pending()) s.stopped_ = true;
  return s.stopped();
}

void Stopper::poll_until_idle(const std::atomic<int64_t>& running) {
  if (!pthread_equal(caller_, pthread_self())) return;
  while (running > 0 && !poll(this)) sched_yield();
}

void Stopper::out_of_memory() { stopped_ = out_of_memory_ = true; }

Outcome Stopper::outcome() const {
  return out_of_memory_ ? Outcome::kOutOfMemory : stopped_ ? Outcome::kInterrupted : Outcome::kDone;
}

void* scratch(size_t worker, int64_t bytes) {
  if (worker_scratch.size() <= worker) worker_scratch.resize(worker + 1);
  return worker_scratch[worker].reserve(bytes);
}

void advise_huge_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = 4096, min_bytes = 4 << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data), begin = (address + page - 1) / page * page;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / page * page;
  if (begin + min_bytes <= end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace regard
