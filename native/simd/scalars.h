// 16-bit float types, and the conversions that do not depend on the instruction set.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

struct Half {
  uint16_t bits;
};
struct BHalf {
  uint16_t bits;
};

// Reinterprets the bits of `a` as type B.
template <class B, class A>
inline B as(A a) {
  static_assert(sizeof(A) == sizeof(B), "same size");
  B b;
  memcpy(&b, &a, sizeof(B));
  return b;
}

inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }
inline float to_float(BHalf x) { return as<float>(static_cast<uint32_t>(x.bits) << 16); }
inline void from_float(float* p, float x) { *p = x; }
inline void from_float(double* p, double x) { *p = x; }
inline void from_float(BHalf* p, float x) {
  const uint32_t u = as<uint32_t>(x);
  p->bits = static_cast<uint16_t>(x != x ? (u | 0x400000) >> 16 : (u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}

}  // namespace
