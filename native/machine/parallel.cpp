#include "machine/parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>

#include <atomic>

namespace regard {
namespace {

using Range = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Range, void* context);
using NumThreads = int32_t (*)(uint32_t* count);

ParallelFor parallel_for = nullptr;
NumThreads num_threads = nullptr;
// OpenMP's threads do not exist in a forked child, and using them hangs.
std::atomic<bool> forked{false};

struct Job {
  void (*work)(int, void*);
  void* context;
};

void run_range(int64_t begin, int64_t end, void* context) {
  const Job& job = *static_cast<const Job*>(context);
  for (int64_t i = begin; i < end; ++i) job.work(static_cast<int>(i), job.context);
}

}  // namespace

bool open_pool(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!handle) return false;
  parallel_for = reinterpret_cast<ParallelFor>(dlsym(handle, "torch_parallel_for"));
  num_threads = reinterpret_cast<NumThreads>(dlsym(handle, "torch_get_num_threads"));
  if (!parallel_for || !num_threads) {
    parallel_for = nullptr;
    return false;
  }
  static const int error = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  return error == 0;
}

int threads() {
  uint32_t count = 1;
  if (!parallel_for || forked.load() || num_threads(&count) != 0) return 1;
  return static_cast<int>(count);
}

void parallel(int workers, void (*work)(int, void*), void* context) {
  Job job{work, context};
  if (workers <= 1 || !parallel_for || forked.load() || parallel_for(0, workers, 1, run_range, &job) != 0)
    run_range(0, workers, &job);
}

}  // namespace regard
