// Vector types and operations with the compiler's vector extension, for any CPU and width:
// REGARD_LANES floats or half as many doubles.
#pragma once
#include <math.h>

#include "simd/scalars.h"

namespace {

// Terms summed in one chain of additions before a new chain begins, which bounds rounding errors.
// The chain is shorter than with AVX2, because `fma` here rounds twice.
constexpr int64_t kChain = 32;

template <class T, int Count>
struct CompilerVector {
  typedef T type __attribute__((vector_size(sizeof(T) * Count)));
};

struct Words {
  static constexpr int N = REGARD_LANES;
  typename CompilerVector<uint32_t, N>::type v;
};
inline Words words(uint32_t x) { return {x - typename CompilerVector<uint32_t, Words::N>::type{}}; }
inline Words load_words(const uint32_t* p) {
  Words w;
  memcpy(&w.v, p, sizeof(w.v));
  return w;
}
inline Words operator+(Words a, Words b) { return {a.v + b.v}; }
inline Words operator*(Words a, Words b) { return {a.v * b.v}; }
inline Words operator^(Words a, Words b) { return {a.v ^ b.v}; }
inline Words operator&(Words a, Words b) { return {a.v & b.v}; }
inline Words shift_right(Words a, int n) { return {a.v >> n}; }
inline Words greater(Words a, Words b) {
  using Signed = typename CompilerVector<int32_t, Words::N>::type;
  return {as<typename CompilerVector<uint32_t, Words::N>::type>(as<Signed>(a.v) > as<Signed>(b.v))};
}

template <class T, class I, int Count>
struct LaneVector {
  using Scalar = T;
  using Int = I;
  using Vector = typename CompilerVector<T, Count>::type;
  using Bits = typename CompilerVector<I, Count>::type;
  using Sum = LaneVector;
  static constexpr int N = Count, kTerms = 1;
  Vector v;
};
template <class V>
struct LaneMask {
  typename V::Bits v;
};
using Floats = LaneVector<float, int32_t, REGARD_LANES>;
using Doubles = LaneVector<double, int64_t, REGARD_LANES / 2>;

#define REGARD_LANE template <class T, class I, int N>
#define REGARD_V LaneVector<T, I, N>
REGARD_LANE inline REGARD_V operator+(REGARD_V a, REGARD_V b) { return {a.v + b.v}; }
REGARD_LANE inline REGARD_V operator-(REGARD_V a, REGARD_V b) { return {a.v - b.v}; }
REGARD_LANE inline REGARD_V operator*(REGARD_V a, REGARD_V b) { return {a.v * b.v}; }
REGARD_LANE inline REGARD_V operator/(REGARD_V a, REGARD_V b) { return {a.v / b.v}; }
REGARD_LANE inline REGARD_V fma(REGARD_V a, REGARD_V b, REGARD_V c) { return {a.v * b.v + c.v}; }
// a * b + c with a single rounding. Slow here, so used only where the rounding matters.
inline float fma_once(float a, float b, float c) {
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
}
inline double fma_once(double a, double b, double c) { return ::fma(a, b, c); }
REGARD_LANE inline REGARD_V fma_once(REGARD_V a, REGARD_V b, REGARD_V c) {
  for (int i = 0; i < N; ++i) c.v[i] = fma_once(a.v[i], b.v[i], c.v[i]);
  return c;
}
REGARD_LANE inline LaneMask<REGARD_V> less(REGARD_V a, REGARD_V b) { return {a.v < b.v}; }
REGARD_LANE inline LaneMask<REGARD_V> not_less(REGARD_V a, REGARD_V b) { return {~(a.v < b.v)}; }
REGARD_LANE inline LaneMask<REGARD_V> differs(REGARD_V a, REGARD_V b) { return {a.v != b.v}; }
REGARD_LANE inline REGARD_V keep(LaneMask<REGARD_V> m, REGARD_V a) {
  using V = REGARD_V;
  return {as<typename V::Vector>(m.v & as<typename V::Bits>(a.v))};
}
REGARD_LANE inline REGARD_V select(LaneMask<REGARD_V> m, REGARD_V a, REGARD_V b) {
  using V = REGARD_V;
  return {as<typename V::Vector>((m.v & as<typename V::Bits>(a.v)) | (~m.v & as<typename V::Bits>(b.v)))};
}
// Return b if either is NaN.
REGARD_LANE inline REGARD_V max(REGARD_V a, REGARD_V b) { return select(less(b, a), a, b); }
REGARD_LANE inline REGARD_V min(REGARD_V a, REGARD_V b) { return select(less(a, b), a, b); }
REGARD_LANE inline REGARD_V ceil(REGARD_V a) {
  for (int i = 0; i < N; ++i) a.v[i] = static_cast<T>(::ceil(a.v[i]));
  return a;
}
REGARD_LANE inline REGARD_V abs(REGARD_V a) {
  const REGARD_V zero = a - a;
  return select(less(a, zero), zero - a, a);
}
REGARD_LANE inline uint32_t bits(LaneMask<REGARD_V> m) {
  uint32_t set = 0;
  for (int i = 0; i < N; ++i) set |= static_cast<uint32_t>(m.v[i] != 0) << i;
  return set;
}
// Returns 2^n from a number whose low mantissa bits hold n + exponent bias.
REGARD_LANE inline REGARD_V power_from_bits(REGARD_V t) {
  using V = REGARD_V;
  return {as<typename V::Vector>(as<typename V::Bits>(t.v) << (sizeof(T) == 4 ? 23 : 52))};
}
REGARD_LANE inline void transpose(REGARD_V (&r)[N]) {
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < i; ++j) {
      const T x = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = x;
    }
}
// Lane i of the result is the sum of r[i].
REGARD_LANE inline REGARD_V lane_sums(REGARD_V (&r)[N]) {
  transpose(r);
  for (int i = 1; i < N; ++i) r[0] = r[0] + r[i];
  return r[0];
}
#undef REGARD_LANE
#undef REGARD_V

inline float to_float(int8_t x) { return x; }
inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7FFF;
  if (magnitude >= 0x7C00)
    return as<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13 | (magnitude > 0x7C00 ? 0x400000 : 0));
  if (magnitude >= 0x400) return as<float>(sign | ((magnitude << 13) + (112u << 23)));
  const float tiny = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -tiny : tiny;
}
inline void from_float(Half* p, float x) {
  const uint32_t u = as<uint32_t>(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7FFFFFFF;
  uint32_t h;
  if (magnitude > 0x7F800000)
    h = 0x7E00 | (magnitude >> 13 & 0x3FF);
  else if (magnitude >= 0x47800000)
    h = 0x7C00;
  else if (magnitude >= 0x38800000)
    h = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  else
    h = as<uint32_t>(as<float>(magnitude) + 0.5f) - 0x3F000000;  // the addition rounds to a multiple of 2^-24
  p->bits = static_cast<uint16_t>(sign | h);
}

// Operations whose arguments do not show the vector type, which is therefore a template argument.
template <class V>
struct Lanes {
  using Scalar = typename V::Scalar;
  using Mask = LaneMask<V>;
  static V zero() { return {typename V::Vector{}}; }
  static V set(Scalar x) { return {x - typename V::Vector{}}; }
  static V load(const Scalar* p) {
    V a = zero();
    memcpy(&a.v, p, sizeof(a.v));
    return a;
  }
  template <class S>
  static V load(const S* p) {
    V a = zero();
    for (int i = 0; i < V::N; ++i) a.v[i] = to_float(p[i]);
    return a;
  }
  static void store(Scalar* p, V a) { memcpy(p, &a.v, sizeof(a.v)); }
  template <class S>
  static void store(S* p, V a) {
    for (int i = 0; i < V::N; ++i) from_float(p + i, a.v[i]);
  }
  // Expands bits `from`, from + 1, ... of a lane set to a mask.
  static Mask mask(uint32_t lanes, int from) {
    Mask m{typename V::Bits{}};
    for (int i = 0; i < V::N; ++i) m.v[i] = lanes >> (from + i) & 1 ? -1 : 0;
    return m;
  }
  // Returns the mask of vector `part` of a panel. With doubles, w holds the words of two vectors.
  static Mask mask(Words w, int part) {
    const int from = V::N == Words::N ? 0 : part * V::N;
    Mask m{typename V::Bits{}};
    for (int i = 0; i < V::N; ++i) m.v[i] = static_cast<int32_t>(w.v[from + i]);
    return m;
  }
  static V iota() {
    V a = zero();
    for (int i = 0; i < V::N; ++i) a.v[i] = static_cast<Scalar>(i);
    return a;
  }
};

// Pairs of bfloat16 numbers, one in each 32-bit word. The low half is the even number.
struct Pairs {
  using Scalar = uint32_t;
  using Sum = Floats;
  static constexpr int N = REGARD_LANES, kTerms = 2;
  typename CompilerVector<uint32_t, N>::type v;
};
// Returns a with denormal numbers replaced by 0.
inline Floats flushed(Floats a) {
  const auto bits = as<Floats::Bits>(a.v);
  return {as<Floats::Vector>(bits & (((bits & 0x7F800000) != 0) | static_cast<int32_t>(0x80000000)))};
}
inline Floats even(Pairs a) { return {as<Floats::Vector>(a.v << 16)}; }
inline Floats odd(Pairs a) { return {as<Floats::Vector>(a.v & 0xFFFF0000)}; }
// The emulations are not inlined: that would take minutes to compile.
#define REGARD_EMULATION __attribute__((noinline, unused)) static
// a.even * b.even + (a.odd * b.odd + c), each sum rounded once. Denormal numbers count as 0.
REGARD_EMULATION Floats fma(Pairs a, Pairs b, Floats c) {
  c = flushed(fma_once(flushed(odd(a)), flushed(odd(b)), flushed(c)));
  return flushed(fma_once(flushed(even(a)), flushed(even(b)), c));
}
// Round to bfloat16. Words of `narrow` hold neighbouring lanes, first those of x; word i of `pair`
// holds lane i of x and of y.
REGARD_EMULATION Pairs pair(Floats x, Floats y) {
  Pairs words;
  for (int i = 0; i < Pairs::N; ++i) {
    BHalf low, high;
    from_float(&low, flushed(x).v[i]);
    from_float(&high, flushed(y).v[i]);
    words.v[i] = low.bits | static_cast<uint32_t>(high.bits) << 16;
  }
  return words;
}
REGARD_EMULATION Pairs narrow(Floats x, Floats y) {
  Floats evens = x, odds = x;
  for (int i = 0; i < Pairs::N; ++i) {
    const Floats& from = 2 * i < Pairs::N ? x : y;
    evens.v[i] = from.v[2 * i % Pairs::N];
    odds.v[i] = from.v[2 * i % Pairs::N + 1];
  }
  return pair(evens, odds);
}
// Word i holds elements i of x and y.
REGARD_EMULATION Pairs interleave(const BHalf* x, const BHalf* y) {
  Pairs words;
  for (int i = 0; i < Pairs::N; ++i) words.v[i] = x[i].bits | static_cast<uint32_t>(y[i].bits) << 16;
  return words;
}
REGARD_EMULATION void transpose(Pairs (&r)[Pairs::N]) {
  for (int i = 0; i < Pairs::N; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t x = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = x;
    }
}
#undef REGARD_EMULATION

template <>
struct Lanes<Pairs> {
  static Pairs set(uint32_t x) { return {x - typename CompilerVector<uint32_t, Pairs::N>::type{}}; }
  template <class S>
  static Pairs load(const S* p) {
    Pairs a;
    memcpy(&a.v, p, sizeof(a.v));
    return a;
  }
  static void store(uint32_t* p, Pairs a) { memcpy(p, &a.v, sizeof(a.v)); }
};

// Converts the low and the high nibbles of Floats::N bytes to floats.
inline void load_nibbles(const uint8_t* p, Floats& low, Floats& high) {
  for (int i = 0; i < Floats::N; ++i) {
    low.v[i] = static_cast<float>(p[i] & 15);
    high.v[i] = static_cast<float>(p[i] >> 4);
  }
}

// Converts nibbles to nibble * scale + offset.
constexpr bool kLooksUpNibbles = false;
inline void dequantise_nibbles(const uint8_t* p, Floats scale, Floats offset, Floats& low, Floats& high) {
  load_nibbles(p, low, high);
  low = fma(low, scale, offset);
  high = fma(high, scale, offset);
}

}  // namespace
