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

class Scratch {
 public:
  Scratch() = default;
  Scratch(Scratch&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr, other.bytes_ = 0;
  }
  ~Scratch() { free(data_); }

  void* hold(int64_t bytes) {
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

thread_local std::vector<Scratch> kept;

}  // namespace

Stopper::Stopper(Interrupt interrupt) : interrupt_(interrupt), asked_(milliseconds()) {}

bool Stopper::ask(void* self) {
  Stopper& s = *static_cast<Stopper*>(self);
  if (s.stopped()) return true;
  if (!pthread_equal(s.caller_, pthread_self())) return false;
  const int64_t now = milliseconds();
  if (now - s.asked_ < 50) return false;
  s.asked_ = now;
  if (s.interrupt_.pending && s.interrupt_.pending()) s.stopped_ = true;
  return s.stopped();
}

void Stopper::watch(const std::atomic<int64_t>& busy) {
  if (!pthread_equal(caller_, pthread_self())) return;
  while (busy > 0 && !ask(this)) sched_yield();
}

void Stopper::out_of_memory() { stopped_ = out_of_memory_ = true; }

Outcome Stopper::outcome() const {
  return out_of_memory_ ? Outcome::kOutOfMemory : stopped_ ? Outcome::kInterrupted : Outcome::kDone;
}

void* scratch(size_t worker, int64_t bytes) {
  if (kept.size() <= worker) kept.resize(worker + 1);
  return kept[worker].hold(bytes);
}

void ask_for_large_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = 4096, large = 4 << 20;
  const uintptr_t from = reinterpret_cast<uintptr_t>(data), begin = (from + page - 1) / page * page;
  const uintptr_t end = (from + static_cast<uintptr_t>(bytes)) / page * page;
  if (begin + large <= end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace regard
