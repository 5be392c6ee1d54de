// Preloaded into a Python process: makes one chosen allocation of a chosen library fail.
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <new>

extern "C" void* __libc_malloc(size_t);
extern "C" void* __libc_memalign(size_t, size_t);

namespace {

uintptr_t low, high;           // the code of the library
std::atomic<long> counted{0};  // its allocations since `arm`
std::atomic<long> failing{-1};

bool fails(void* caller) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(caller);
  return low <= address && address < high && counted++ == failing;
}

void* checked(void* memory) {
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

#define CALLER __builtin_return_address(0)

extern "C" {
void watch(uintptr_t begin, uintptr_t end) { low = begin, high = end; }
// Makes allocation `index` from now on fail; none if index is negative.
void arm(long index) { counted = 0, failing = index; }
long count() { return counted; }

void* malloc(size_t bytes) { return fails(CALLER) ? nullptr : __libc_malloc(bytes); }
void* aligned_alloc(size_t alignment, size_t bytes) {
  return fails(CALLER) ? nullptr : __libc_memalign(alignment, bytes);
}
}

void* operator new(size_t bytes) { return checked(fails(CALLER) ? nullptr : __libc_malloc(bytes)); }
void* operator new[](size_t bytes) { return checked(fails(CALLER) ? nullptr : __libc_malloc(bytes)); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return checked(fails(CALLER) ? nullptr : __libc_memalign(static_cast<size_t>(alignment), bytes));
}
