// Loads two vectors of elements in any order, which for bfloat16 is the fastest: an even element is
// the upper half of a float whose lower half is 0, and an odd element needs a bit mask only.
#pragma once
#include "kernels/isa.h"

namespace {

// Loads half of 2 * V::N elements. Which elements are in which half depends on V and S only.
template <class V, int Half, class S>
inline V load_half(const S* p) {
  return Lanes<V>::load(p + Half * V::N);
}

#if defined(__AVX512F__)
template <>
inline Floats load_half<Floats, 0>(const BHalf* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
template <>
inline Floats load_half<Floats, 1>(const BHalf* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(~0xFFFF)))};
}
#elif defined(__AVX2__)
inline __m256i load_words(const BHalf* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
template <>
inline Floats load_half<Floats, 0>(const BHalf* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load_words(p), 16))};
}
template <>
inline Floats load_half<Floats, 1>(const BHalf* p) {
  return {_mm256_castsi256_ps(_mm256_and_si256(load_words(p), _mm256_set1_epi32(~0xFFFF)))};
}
#endif

}  // namespace
