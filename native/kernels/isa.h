// Definitions that all kernels share. Each kernel source is compiled once for each instruction set
// (REGARD_ISA) with that set's flags. All code is in anonymous namespaces; each source exports one
// table of functions.
#pragma once
#include <math.h>
#include <stdint.h>

// A loop over a small constant count that the compiler unrolls completely.
#define UNROLLED(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); ++i)

#if defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#else
#include "simd/generic.h"
#endif

#include "kernels/kernels.h"

using namespace regard;

// The scalar type of a vector's lanes.
template <class V>
using Number = typename V::Scalar;

// The operand of matrix products: the vector type of their factors. O::Sum is the vector type of the
// products' sums. An element (Number<O>) holds O::kTerms numbers: with Pairs two bfloat16 numbers.
template <class V, class S>
struct OperandOf {
  using type = V;
};
#ifdef REGARD_PAIRS
template <>
struct OperandOf<Floats, BHalf> {
  using type = Pairs;
};
#endif
template <class V, class S>
using Operand = typename OperandOf<V, S>::type;
template <class O>
using Sum = typename O::Sum;

#define REGARD_JOIN(a, b) a##_##b
#define REGARD_SYMBOL(table, isa) REGARD_JOIN(table, isa)
// The symbol of a table for this instruction set, for example regard_forward_avx2.
#define REGARD_TABLE(family) REGARD_SYMBOL(regard_##family, REGARD_ISA)

// An instruction set that adds instructions for bfloat16 to REGARD_BASE is compiled for bfloat16 only,
// and uses the tables of REGARD_BASE for all else.
#ifdef REGARD_BASE
#define REGARD_EACH_DTYPE(make, ...)                 \
  {                                                  \
    {}, {}, make<Floats, BHalf, ##__VA_ARGS__>(), {} \
  }
#else
#define REGARD_BASE REGARD_ISA
// Initialises a table with one entry for each DType, in the order of the enum.
#define REGARD_EACH_DTYPE(make, ...)                                             \
  {make<Floats, float, ##__VA_ARGS__>(), make<Doubles, double, ##__VA_ARGS__>(), \
   make<Floats, BHalf, ##__VA_ARGS__>(), make<Floats, Half, ##__VA_ARGS__>()}
#endif
#define REGARD_BASE_TABLE(family) REGARD_SYMBOL(regard_##family, REGARD_BASE)

extern "C" {
extern const ForwardKernels REGARD_TABLE(forward)[4], REGARD_BASE_TABLE(forward)[4];
extern const DecodeKernels REGARD_BASE_TABLE(decode)[4];
extern const BackwardKernels REGARD_TABLE(backward)[4], REGARD_BASE_TABLE(backward)[4];
extern const WriteKernels REGARD_BASE_TABLE(write)[4];
extern const LinearKernels REGARD_BASE_TABLE(linear)[4], REGARD_BASE_TABLE(linear_gradients)[4];
extern const EvidenceKernels REGARD_TABLE(evidence)[4], REGARD_BASE_TABLE(evidence)[4];
extern const ProjectionKernels REGARD_BASE_TABLE(projection)[4];
}
