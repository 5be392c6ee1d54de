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

#define REGARD_JOIN(a, b) a##_##b
#define REGARD_SYMBOL(table, isa) REGARD_JOIN(table, isa)
// The symbol of a table for this instruction set, for example regard_forward_avx2.
#define REGARD_TABLE(family) REGARD_SYMBOL(regard_##family, REGARD_ISA)

// Initialises a table with one entry for each DType, in the order of the enum.
#define REGARD_EACH_DTYPE(make, ...)                                             \
  {make<Floats, float, ##__VA_ARGS__>(), make<Doubles, double, ##__VA_ARGS__>(), \
   make<Floats, BHalf, ##__VA_ARGS__>(), make<Floats, Half, ##__VA_ARGS__>()}

extern "C" {
extern const ForwardKernels REGARD_TABLE(forward)[4];
extern const DecodeKernels REGARD_TABLE(decode)[4];
extern const BackwardKernels REGARD_TABLE(backward)[4];
extern const WriteKernels REGARD_TABLE(write)[4];
extern const LinearKernels REGARD_TABLE(linear)[4], REGARD_TABLE(linear_gradients)[4];
extern const EvidenceKernels REGARD_TABLE(evidence)[4];
extern const ProjectionKernels REGARD_TABLE(projection)[4];
}
