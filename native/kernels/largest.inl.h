// Top-k selection over values whose keys arrive in ascending order. The heap is the output buffer.
#pragma once
#include "kernels/isa.h"

namespace {

// A min-heap: element 0 is the k-th largest so far. Ties go to the lower key index.
template <class Scalar>
struct TopK {
  Scalar* values;
  int64_t* keys;
  int64_t k;
  int& size;

  bool full() const { return size == k; }
  Scalar threshold() const { return values[0]; }

  void push(Scalar value, int64_t key) {
    if (!full()) {
      set(size, value, key);
      for (int64_t i = size++; i && ranks_below(i, (i - 1) / 2); i = (i - 1) / 2) swap(i, (i - 1) / 2);
    } else if (value > values[0]) {
      set(0, value, key);
      sift_down(0, k);
    }
  }

  template <class Transform>
  void transform(Transform convert) {
    for (int64_t i = 0; i < size; ++i) values[i] = convert(values[i]);
  }

  // Sorts by descending value, then by ascending key. Unused entries get value 0 and key -1.
  void sort() {
    for (int64_t i = size / 2 - 1; i >= 0; --i) sift_down(i, size);
    for (int64_t end = size - 1; end > 0; --end) {
      swap(0, end);
      sift_down(0, end);
    }
    for (int64_t i = size; i < k; ++i) set(i, 0, -1);
  }

 private:
  // A row with NaN is NaN everywhere: no value is less than another, and keys decide.
  bool ranks_below(int64_t a, int64_t b) const {
    return values[a] < values[b] || (!(values[b] < values[a]) && keys[a] > keys[b]);
  }

  void set(int64_t i, Scalar value, int64_t key) {
    values[i] = value;
    keys[i] = key;
  }

  void swap(int64_t a, int64_t b) {
    const Scalar value = values[a];
    const int64_t key = keys[a];
    set(a, values[b], keys[b]);
    set(b, value, key);
  }

  void sift_down(int64_t i, int64_t count) {
    for (int64_t child; (child = 2 * i + 1) < count; i = child) {
      if (child + 1 < count && ranks_below(child + 1, child)) ++child;
      if (!ranks_below(child, i)) return;
      swap(i, child);
    }
  }
};

// Returns the first element of an ascending array that is not below `limit`.
inline const int64_t* lower_bound(const int64_t* begin, const int64_t* end, int64_t limit) {
  while (begin < end) {
    const int64_t* middle = begin + (end - begin) / 2;
    if (*middle < limit)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

}  // namespace
