// A bump allocator over one scratch buffer. Allocations are rounded up to cache lines of 64 bytes.
#pragma once
#include "kernels/isa.h"

namespace {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Arena {
  char* free;

  template <class T>
  T* take(int64_t count) {
    T* block = reinterpret_cast<T*>(free);
    free += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return block;
  }
};

}  // namespace
