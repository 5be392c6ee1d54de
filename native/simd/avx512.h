// Vector types and operations with AVX-512 (F, BW, DQ, VL): 16 floats or 8 doubles.
#pragma once
#include <immintrin.h>

#include "simd/scalars.h"

namespace {

// Terms summed in one chain of additions before a new chain begins, which bounds rounding errors.
constexpr int64_t kChain = 128;

struct Words {
  static constexpr int N = 16;
  __m512i v;
};
struct WordMask {
  __mmask16 v;
};
inline Words words(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline Words load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Words operator+(Words a, Words b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Words operator*(Words a, Words b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Words operator^(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Words operator&(Words a, Words b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Words shift_right(Words a, int n) { return {_mm512_srli_epi32(a.v, static_cast<unsigned>(n))}; }
inline WordMask greater(Words a, Words b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }

struct Floats {
  using Scalar = float;
  using Sum = Floats;
  static constexpr int N = 16, kTerms = 1;
  __m512 v;
};
struct FloatMask {
  __mmask16 v;
};

struct Doubles {
  using Scalar = double;
  using Sum = Doubles;
  static constexpr int N = 8, kTerms = 1;
  __m512d v;
};
struct DoubleMask {
  __mmask8 v;
};

// Defines the operations of vector type V with mask type M; `suffix` (ps, pd) is the suffix of the
// intrinsics. max(a, b) and min(a, b) are b if either is NaN. keep(m, a) is a where m is set, else 0.
#define REGARD_VECTOR(V, M, suffix)                                                           \
  inline V operator+(V a, V b) { return {_mm512_add_##suffix(a.v, b.v)}; }                    \
  inline V operator-(V a, V b) { return {_mm512_sub_##suffix(a.v, b.v)}; }                    \
  inline V operator*(V a, V b) { return {_mm512_mul_##suffix(a.v, b.v)}; }                    \
  inline V operator/(V a, V b) { return {_mm512_div_##suffix(a.v, b.v)}; }                    \
  inline V fma(V a, V b, V c) { return {_mm512_fmadd_##suffix(a.v, b.v, c.v)}; }              \
  inline V fma_once(V a, V b, V c) { return fma(a, b, c); }                                   \
  inline V max(V a, V b) { return {_mm512_max_##suffix(a.v, b.v)}; }                          \
  inline V min(V a, V b) { return {_mm512_min_##suffix(a.v, b.v)}; }                          \
  inline V ceil(V a) { return {_mm512_roundscale_##suffix(a.v, _MM_FROUND_CEIL)}; }           \
  inline V abs(V a) { return {_mm512_abs_##suffix(a.v)}; }                                    \
  inline M less(V a, V b) { return {_mm512_cmp_##suffix##_mask(a.v, b.v, _CMP_LT_OQ)}; }      \
  inline M not_less(V a, V b) { return {_mm512_cmp_##suffix##_mask(a.v, b.v, _CMP_NLT_UQ)}; } \
  inline M differs(V a, V b) { return {_mm512_cmp_##suffix##_mask(a.v, b.v, _CMP_NEQ_UQ)}; }  \
  inline V select(M m, V a, V b) { return {_mm512_mask_blend_##suffix(m.v, b.v, a.v)}; }      \
  inline V keep(M m, V a) { return {_mm512_maskz_mov_##suffix(m.v, a.v)}; }                   \
  inline uint32_t bits(M m) { return m.v; }
REGARD_VECTOR(Floats, FloatMask, ps)
REGARD_VECTOR(Doubles, DoubleMask, pd)
#undef REGARD_VECTOR

inline float fma_once(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma_once(double a, double b, double c) { return __builtin_fma(a, b, c); }

// Returns 2^n from a float whose low mantissa bits hold n + 127.
inline Floats power_from_bits(Floats t) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t.v), 23))};
}
// Returns 2^n from a double whose low mantissa bits hold n + 1023.
inline Doubles power_from_bits(Doubles t) {
  return {_mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(t.v), 52))};
}

// 128-bit quarters 0 and 2, or 1 and 3, of a and then of b.
inline __m512 even_quarters(__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x88); }
inline __m512 odd_quarters(__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0xDD); }
inline __m512d even_quarters(__m512d a, __m512d b) { return _mm512_shuffle_f64x2(a, b, 0x88); }
inline __m512d odd_quarters(__m512d a, __m512d b) { return _mm512_shuffle_f64x2(a, b, 0xDD); }

// Transposes a 4 x 4 matrix of 128-bit quarters: quarter j of result i is quarter i of x[j].
template <class X>
inline void transpose_quarters(X& x0, X& x1, X& x2, X& x3) {
  const X even = even_quarters(x0, x1), odd = odd_quarters(x0, x1);
  const X even_high = even_quarters(x2, x3), odd_high = odd_quarters(x2, x3);
  x0 = even_quarters(even, even_high);
  x1 = even_quarters(odd, odd_high);
  x2 = odd_quarters(even, even_high);
  x3 = odd_quarters(odd, odd_high);
}

// Adds the quarters of each vector. Quarter i of the result is the sum for x[i].
template <class V>
inline V quarter_sums(V x0, V x1, V x2, V x3) {
  const V low = V{even_quarters(x0.v, x1.v)} + V{odd_quarters(x0.v, x1.v)};
  const V high = V{even_quarters(x2.v, x3.v)} + V{odd_quarters(x2.v, x3.v)};
  return V{even_quarters(low.v, high.v)} + V{odd_quarters(low.v, high.v)};
}

inline void transpose(Floats (&r)[16]) {
  __m512 a[16];
  UNROLLED (i, 8) {
    a[2 * i] = _mm512_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v);
    a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v);
  }
  UNROLLED (i, 4) {
    r[i].v = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    r[i + 4].v = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
    r[i + 8].v = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    r[i + 12].v = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
  }
  UNROLLED (j, 4) transpose_quarters(r[4 * j].v, r[4 * j + 1].v, r[4 * j + 2].v, r[4 * j + 3].v);
  // r[4 * j + i] has column 4 * i + j now.
  UNROLLED (i, 4)
    for (int j = 0; j < i; ++j) {
      const Floats x = r[4 * i + j];
      r[4 * i + j] = r[4 * j + i];
      r[4 * j + i] = x;
    }
}

// Lane i of the result is the sum of r[i].
inline Floats lane_sums(const Floats (&r)[16]) {
  Floats a[8], b[4];
  UNROLLED (i, 8)
    a[i] = Floats{_mm512_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v)} +
           Floats{_mm512_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v)};
  UNROLLED (i, 4)
    b[i] = Floats{_mm512_shuffle_ps(a[2 * i].v, a[2 * i + 1].v, 0x44)} +
           Floats{_mm512_shuffle_ps(a[2 * i].v, a[2 * i + 1].v, 0xEE)};
  return quarter_sums(b[0], b[1], b[2], b[3]);
}

inline void transpose(Doubles (&r)[8]) {
  __m512d even[4], odd[4];
  UNROLLED (i, 4) {
    even[i] = _mm512_unpacklo_pd(r[2 * i].v, r[2 * i + 1].v);
    odd[i] = _mm512_unpackhi_pd(r[2 * i].v, r[2 * i + 1].v);
  }
  transpose_quarters(even[0], even[1], even[2], even[3]);
  transpose_quarters(odd[0], odd[1], odd[2], odd[3]);
  UNROLLED (i, 4) {
    r[2 * i].v = even[i];
    r[2 * i + 1].v = odd[i];
  }
}

inline Doubles lane_sums(const Doubles (&r)[8]) {
  Doubles a[4];
  UNROLLED (i, 4)
    a[i] = Doubles{_mm512_unpacklo_pd(r[2 * i].v, r[2 * i + 1].v)} +
           Doubles{_mm512_unpackhi_pd(r[2 * i].v, r[2 * i + 1].v)};
  return quarter_sums(a[0], a[1], a[2], a[3]);
}

// Operations whose arguments do not show the vector type, which is therefore a template argument.
template <class V>
struct Lanes;

template <>
struct Lanes<Floats> {
  using Mask = FloatMask;
  static Floats zero() { return {_mm512_setzero_ps()}; }
  static Floats set(float x) { return {_mm512_set1_ps(x)}; }
  static Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Floats load(const BHalf* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
  }
  static Floats load(const Half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Floats load(const int8_t* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
  }
  static void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
  static void store(BHalf* p, Floats a) {
    const __m512i x = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __m512i quiet = _mm512_or_si512(x, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i top = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(top));
  }
  static void store(Half* p, Floats a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
  }
  // Bits `from`, from + 1, ... of a lane set.
  static Mask mask(uint32_t lanes, int from) { return {static_cast<__mmask16>(lanes >> from)}; }
  static Mask mask(WordMask m, int) { return {m.v}; }
  static Floats iota() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
};

template <>
struct Lanes<Doubles> {
  using Mask = DoubleMask;
  static Doubles zero() { return {_mm512_setzero_pd()}; }
  static Doubles set(double x) { return {_mm512_set1_pd(x)}; }
  static Doubles load(const double* p) { return {_mm512_loadu_pd(p)}; }
  static Doubles load(const float* p) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }
  static void store(double* p, Doubles a) { _mm512_storeu_pd(p, a.v); }
  static Mask mask(uint32_t lanes, int from) { return {static_cast<__mmask8>(lanes >> from)}; }
  // Returns the mask of vector `part` of a panel: the lower half of the words if `part` is even,
  // else the upper half.
  static Mask mask(WordMask m, int part) { return {static_cast<__mmask8>(part & 1 ? m.v >> 8 : m.v)}; }
  static Doubles iota() { return {_mm512_setr_pd(0, 1, 2, 3, 4, 5, 6, 7)}; }
};

#ifdef __AVX512BF16__
// Pairs of bfloat16 numbers, one in each 32-bit word. The low half is the even number.
struct Pairs {
  using Scalar = uint32_t;
  using Sum = Floats;
  static constexpr int N = 16, kTerms = 2;
  __m512i v;
};
// a.even * b.even + (a.odd * b.odd + c), each sum rounded once. Denormal numbers count as 0.
inline Floats fma(Pairs a, Pairs b, Floats c) {
  return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)};
}
inline Floats even(Pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
inline Floats odd(Pairs a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))))};
}
// Round to bfloat16. Words of `narrow` hold neighbouring lanes, first those of x; word i of `pair`
// holds lane i of x and of y.
inline Pairs narrow(Floats x, Floats y) { return {(__m512i)_mm512_cvtne2ps_pbh(y.v, x.v)}; }
inline Pairs pair(Floats x, Floats y) {
  // Half 2 * i is lane i of x, half 2 * i + 1 lane i of y.
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i halves =
      _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(0x100000));
  return {_mm512_permutexvar_epi16(halves, narrow(x, y).v)};
}
// Word i holds elements i of x and y.
inline Pairs interleave(const BHalf* x, const BHalf* y) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y));
  return {_mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16))};
}
inline void transpose(Pairs (&r)[16]) {
  Floats x[16];
  UNROLLED (i, 16) x[i].v = _mm512_castsi512_ps(r[i].v);
  transpose(x);
  UNROLLED (i, 16) r[i].v = _mm512_castps_si512(x[i].v);
}

template <>
struct Lanes<Pairs> {
  static Pairs set(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
  static Pairs load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
  static Pairs load(const BHalf* p) { return {_mm512_loadu_si512(p)}; }
  static void store(uint32_t* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
};
#endif

// Converts the low and the high nibbles of 16 bytes to floats.
inline void load_nibbles(const uint8_t* p, Floats& low, Floats& high) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  low.v = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
  high.v = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4));
}

// Converts the low and the high nibbles of 16 bytes to nibble * scale + offset, by a look-up in a
// register that holds the 16 results.
constexpr bool kLooksUpNibbles = true;
inline void dequantise_nibbles(const uint8_t* p, Floats scale, Floats offset, Floats& low, Floats& high) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const Floats table = fma(Lanes<Floats>::iota(), scale, offset);
  low.v = _mm512_permutexvar_ps(bytes, table.v);
  high.v = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table.v);
}

inline float to_float(Half x) { return _cvtsh_ss(x.bits); }
inline void from_float(Half* p, float x) { p->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

}  // namespace
