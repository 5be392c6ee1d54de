// exp2 and tanh over vectors, and reductions over the lanes of a vector.
#pragma once
#include "kernels/isa.h"

namespace {

// Polynomials for 2^f = 1 + f * q(f) on [-1/2, 1/2]. `q_expm1` has more terms, for 2^f - 1 without
// cancellation. kRound, added to z, leaves round(z) plus the exponent bias in the low mantissa
// bits.
template <class V>
struct Exp2;

template <>
struct Exp2<Floats> {
  static constexpr float kRound = 0x1.8p23f + 127, kLowest = -126, kSaturated = 40, kLargestShift = 0x1p20f;
  static constexpr float q[] = {0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f,
                                0x1.5bba14p-10f};
  static constexpr float q_expm1[] = {0x1.62e430p-1f, 0x1.ebfbe0p-3f,  0x1.c6af6ep-5f,
                                      0x1.3b2a54p-7f, 0x1.5f0890p-10f, 0x1.44138ap-13f};
};

template <>
struct Exp2<Doubles> {
  static constexpr double kRound = 0x1.8p52 + 1023, kLowest = -1022, kSaturated = 80, kLargestShift = 0x1p40;
  static constexpr double q[] = {0x1.62e42fefa39efp-1,  0x1.ebfbdff82c58fp-3,  0x1.c6b08d704a0c6p-5,
                                 0x1.3b2ab6fba4e79p-7,  0x1.5d87fe78a3f9cp-10, 0x1.430912f86b7dbp-13,
                                 0x1.ffcbfc6da6ed1p-17, 0x1.62c02242b879cp-20, 0x1.b524ebd13a55fp-24,
                                 0x1.e4cf10dec0f59p-28, 0x1.e9ec1fcb69a7fp-32, 0x1.c4a29324a1038p-36};
  static constexpr const double (&q_expm1)[12] = q;
};

template <class V, int Count>
inline V horner(const Number<V> (&c)[Count], V x) {
  V sum = Lanes<V>::set(c[Count - 1]);
#pragma GCC unroll 16
  for (int i = Count - 2; i >= 0; --i) sum = fma(sum, x, Lanes<V>::set(c[i]));
  return sum;
}

// 2^z for z <= 126. Exactly 0 for -inf and for z below the smallest normal exponent; NaN stays NaN.
template <class V>
inline V exp2(V z) {
  const V round = Lanes<V>::set(Exp2<V>::kRound);
  const V t = z + round, f = z - (t - round);
  const V power = fma(horner(Exp2<V>::q, f), f, Lanes<V>::set(1)) * power_from_bits(t);
  return keep(not_less(z, Lanes<V>::set(Exp2<V>::kLowest)), power);
}

// 2^(s - shift) for an integer shift with |shift| <= kLargestShift. Adding kRound - shift to s
// subtracts the shift and rounds in one operation.
template <class V>
struct ShiftedExp2 {
  V round, lowest;
  explicit ShiftedExp2(V shift)
      : round(Lanes<V>::set(Exp2<V>::kRound) - shift), lowest(shift + Lanes<V>::set(Exp2<V>::kLowest)) {}
  // Returns whether the shifts of all lanes are small enough for `round` to be exact.
  static bool fits(V shift) { return bits(less(Lanes<V>::set(Exp2<V>::kLargestShift), abs(shift))) == 0; }
  V operator()(V s) const {
    const V t = s + round, f = s - (t - round);
    const V power = fma(horner(Exp2<V>::q, f), f, Lanes<V>::set(1)) * power_from_bits(t);
    return keep(not_less(s, lowest), power);
  }
};

// Replaces each y = 2 * log2(e) * x by tanh(x), computed as e / (e + 2) with e = 2^y - 1. The steps of
// K vectors alternate, because one chain is too long for the processor to overlap it with others.
template <class V, int K>
inline void tanh_of(V (&y)[K]) {
  const V limit = Lanes<V>::set(Exp2<V>::kSaturated), one = Lanes<V>::set(1);
  const V round = Lanes<V>::set(Exp2<V>::kRound);
  V power[K], q[K];
  UNROLLED (k, K) y[k] = min(limit, max(Lanes<V>::zero() - limit, y[k]));
  UNROLLED (k, K) power[k] = y[k] + round;
  UNROLLED (k, K) y[k] = y[k] - (power[k] - round);
  UNROLLED (k, K) q[k] = horner(Exp2<V>::q_expm1, y[k]);
  UNROLLED (k, K) power[k] = power_from_bits(power[k]);
  UNROLLED (k, K) q[k] = fma(q[k] * y[k], power[k], power[k] - one);
  UNROLLED (k, K) y[k] = q[k] / (q[k] + Lanes<V>::set(2));
}

template <class V>
inline Number<V> first_lane(V x) {
  Number<V> lane[V::N];
  Lanes<V>::store(lane, x);
  return lane[0];
}

template <class V>
inline Number<V> lane_sum(V x) {
  Number<V> lane[V::N], sum = 0;
  Lanes<V>::store(lane, x);
  for (int i = 0; i < V::N; ++i) sum += lane[i];
  return sum;
}

}  // namespace
