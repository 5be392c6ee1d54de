// Vector types and operations with AVX2, FMA and F16C: 8 floats or 4 doubles.
#pragma once
#include <immintrin.h>

#include "simd/scalars.h"

namespace {

// Terms summed in one chain of additions before a new chain begins, which bounds rounding errors.
constexpr int64_t kChain = 128;

struct Words {
  static constexpr int N = 8;
  __m256i v;
};
inline Words words(uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
inline Words load_words(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline Words operator+(Words a, Words b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Words operator*(Words a, Words b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline Words operator^(Words a, Words b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline Words operator&(Words a, Words b) { return {_mm256_and_si256(a.v, b.v)}; }
inline Words shift_right(Words a, int n) { return {_mm256_srli_epi32(a.v, n)}; }
inline Words greater(Words a, Words b) { return {_mm256_cmpgt_epi32(a.v, b.v)}; }

struct Floats {
  using Scalar = float;
  using Sum = Floats;
  static constexpr int N = 8, kTerms = 1;
  __m256 v;
};
struct FloatMask {
  __m256 v;
};

struct Doubles {
  using Scalar = double;
  using Sum = Doubles;
  static constexpr int N = 4, kTerms = 1;
  __m256d v;
};
struct DoubleMask {
  __m256d v;
};

// Defines the operations of vector type V with mask type M; `suffix` (ps, pd) is the suffix of the
// intrinsics. max(a, b) and min(a, b) are b if either is NaN. keep(m, a) is a where m is set, else 0.
#define REGARD_VECTOR(V, M, suffix)                                                        \
  inline V operator+(V a, V b) { return {_mm256_add_##suffix(a.v, b.v)}; }                 \
  inline V operator-(V a, V b) { return {_mm256_sub_##suffix(a.v, b.v)}; }                 \
  inline V operator*(V a, V b) { return {_mm256_mul_##suffix(a.v, b.v)}; }                 \
  inline V operator/(V a, V b) { return {_mm256_div_##suffix(a.v, b.v)}; }                 \
  inline V fma(V a, V b, V c) { return {_mm256_fmadd_##suffix(a.v, b.v, c.v)}; }           \
  inline V fma_once(V a, V b, V c) { return fma(a, b, c); }                                \
  inline V max(V a, V b) { return {_mm256_max_##suffix(a.v, b.v)}; }                       \
  inline V min(V a, V b) { return {_mm256_min_##suffix(a.v, b.v)}; }                       \
  inline V ceil(V a) { return {_mm256_ceil_##suffix(a.v)}; }                               \
  inline V abs(V a) { return {_mm256_andnot_##suffix(_mm256_set1_##suffix(-0.0f), a.v)}; } \
  inline M less(V a, V b) { return {_mm256_cmp_##suffix(a.v, b.v, _CMP_LT_OQ)}; }          \
  inline M not_less(V a, V b) { return {_mm256_cmp_##suffix(a.v, b.v, _CMP_NLT_UQ)}; }     \
  inline M differs(V a, V b) { return {_mm256_cmp_##suffix(a.v, b.v, _CMP_NEQ_UQ)}; }      \
  inline V select(M m, V a, V b) { return {_mm256_blendv_##suffix(b.v, a.v, m.v)}; }       \
  inline V keep(M m, V a) { return {_mm256_and_##suffix(m.v, a.v)}; }                      \
  inline uint32_t bits(M m) { return static_cast<uint32_t>(_mm256_movemask_##suffix(m.v)); }
REGARD_VECTOR(Floats, FloatMask, ps)
REGARD_VECTOR(Doubles, DoubleMask, pd)
#undef REGARD_VECTOR

inline float fma_once(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma_once(double a, double b, double c) { return __builtin_fma(a, b, c); }

// Returns 2^n from a float whose low mantissa bits hold n + 127.
inline Floats power_from_bits(Floats t) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t.v), 23))};
}

inline void transpose(Floats (&r)[8]) {
  __m256 a[8], b[8];
  UNROLLED (i, 4) {
    a[2 * i] = _mm256_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v);
    a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v);
  }
  UNROLLED (i, 2) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
  }
  UNROLLED (i, 4) {
    r[i].v = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4].v = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

// Lane i of the result is the sum of r[i].
inline Floats lane_sums(const Floats (&r)[8]) {
  __m256 a[4], b[2];
  UNROLLED (i, 4)
    a[i] = _mm256_add_ps(_mm256_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v),
                         _mm256_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v));
  UNROLLED (i, 2)
    b[i] = _mm256_add_ps(_mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44),
                         _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0xEE));
  return {_mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31))};
}

// Returns 2^n from a double whose low mantissa bits hold n + 1023.
inline Doubles power_from_bits(Doubles t) {
  return {_mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(t.v), 52))};
}

inline void transpose(Doubles (&r)[4]) {
  const __m256d a = _mm256_unpacklo_pd(r[0].v, r[1].v), b = _mm256_unpackhi_pd(r[0].v, r[1].v);
  const __m256d c = _mm256_unpacklo_pd(r[2].v, r[3].v), d = _mm256_unpackhi_pd(r[2].v, r[3].v);
  r[0].v = _mm256_permute2f128_pd(a, c, 0x20);
  r[1].v = _mm256_permute2f128_pd(b, d, 0x20);
  r[2].v = _mm256_permute2f128_pd(a, c, 0x31);
  r[3].v = _mm256_permute2f128_pd(b, d, 0x31);
}

inline Doubles lane_sums(const Doubles (&r)[4]) {
  const __m256d a = _mm256_hadd_pd(r[0].v, r[1].v), b = _mm256_hadd_pd(r[2].v, r[3].v);
  return {_mm256_add_pd(_mm256_permute2f128_pd(a, b, 0x20), _mm256_permute2f128_pd(a, b, 0x31))};
}

// Operations whose arguments do not show the vector type, which is therefore a template argument.
template <class V>
struct Lanes;

template <>
struct Lanes<Floats> {
  using Mask = FloatMask;
  static Floats zero() { return {_mm256_setzero_ps()}; }
  static Floats set(float x) { return {_mm256_set1_ps(x)}; }
  static Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Floats load(const BHalf* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
  }
  static Floats load(const Half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Floats load(const int8_t* p) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))};
  }
  static void store(float* p, Floats a) { _mm256_storeu_ps(p, a.v); }
  static void store(BHalf* p, Floats a) {
    const __m256i x = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    const __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(top, top), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void store(Half* p, Floats a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
  }
  // Expands bits `from`, from + 1, ... of a lane set to a mask.
  static Mask mask(uint32_t lanes, int from) {
    const __m256i bit = _mm256_sllv_epi32(_mm256_set1_epi32(1), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i set = _mm256_set1_epi32(static_cast<int>(lanes >> from));
    return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(set, bit), bit))};
  }
  static Mask mask(Words w, int) { return {_mm256_castsi256_ps(w.v)}; }
  static Floats iota() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }
};

template <>
struct Lanes<Doubles> {
  using Mask = DoubleMask;
  static Doubles zero() { return {_mm256_setzero_pd()}; }
  static Doubles set(double x) { return {_mm256_set1_pd(x)}; }
  static Doubles load(const double* p) { return {_mm256_loadu_pd(p)}; }
  static Doubles load(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p))}; }
  static void store(double* p, Doubles a) { _mm256_storeu_pd(p, a.v); }
  static Mask mask(uint32_t lanes, int from) {
    const __m256i bit = _mm256_setr_epi64x(1, 2, 4, 8);
    const __m256i set = _mm256_set1_epi64x(static_cast<int64_t>(lanes >> from));
    return {_mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(set, bit), bit))};
  }
  // Returns the mask of vector `part` of a panel: widens the lower half of the words if `part` is
  // even, else the upper half.
  static Mask mask(Words w, int part) {
    const __m128i half = part & 1 ? _mm256_extracti128_si256(w.v, 1) : _mm256_castsi256_si128(w.v);
    return {_mm256_castsi256_pd(_mm256_cvtepi32_epi64(half))};
  }
  static Doubles iota() { return {_mm256_setr_pd(0, 1, 2, 3)}; }
};

// Converts the low and the high nibbles of 8 bytes to floats.
inline void load_nibbles(const uint8_t* p, Floats& low, Floats& high) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  low.v = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15)));
  high.v = _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
}

// Converts nibbles to nibble * scale + offset.
constexpr bool kLooksUpNibbles = false;
inline void dequantise_nibbles(const uint8_t* p, Floats scale, Floats offset, Floats& low, Floats& high) {
  load_nibbles(p, low, high);
  low = fma(low, scale, offset);
  high = fma(high, scale, offset);
}

inline float to_float(Half x) { return _cvtsh_ss(x.bits); }
inline void from_float(Half* p, float x) { p->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

}  // namespace
