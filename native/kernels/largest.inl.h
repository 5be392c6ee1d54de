// The k largest of a row of numbers that come with ascending keys, kept in the memory of the result.
#pragma once
#include "kernels/isa.h"

namespace {

// A heap: the first is the least, of equal ones that with the highest key.
template <class Scalar>
struct Largest {
  Scalar* values;
  int64_t* keys;
  int64_t k;
  int& filled;

  bool full() const { return filled == k; }
  Scalar least() const { return values[0]; }

  void offer(Scalar value, int64_t key) {
    if (!full()) {
      set(filled, value, key);
      for (int64_t at = filled++; at && worse(at, (at - 1) / 2); at = (at - 1) / 2) swap(at, (at - 1) / 2);
    } else if (value > values[0]) {
      set(0, value, key);
      sink(0, k);
    }
  }

  template <class Change>
  void each(Change change) {
    for (int64_t i = 0; i < filled; ++i) values[i] = change(values[i]);
  }

  // By falling value, then by rising key; keys of -1 and zeros behind them.
  void sort() {
    for (int64_t i = filled / 2 - 1; i >= 0; --i) sink(i, filled);
    for (int64_t end = filled - 1; end > 0; --end) {
      swap(0, end);
      sink(0, end);
    }
    for (int64_t i = filled; i < k; ++i) set(i, 0, -1);
  }

 private:
  // NaN is never less: a row that has it is NaN throughout, and keys decide.
  bool worse(int64_t a, int64_t b) const {
    return values[a] < values[b] || (!(values[b] < values[a]) && keys[a] > keys[b]);
  }

  void set(int64_t at, Scalar value, int64_t key) {
    values[at] = value;
    keys[at] = key;
  }

  void swap(int64_t a, int64_t b) {
    const Scalar value = values[a];
    const int64_t key = keys[a];
    set(a, values[b], keys[b]);
    set(b, value, key);
  }

  void sink(int64_t at, int64_t count) {
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
      if (child + 1 < count && worse(child + 1, child)) ++child;
      if (!worse(child, at)) return;
      swap(at, child);
    }
  }
};

// The first of ascending numbers that is not below `limit`.
inline const int64_t* first_not_below(const int64_t* begin, const int64_t* end, int64_t limit) {
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
