// What all kernels stand on. Their sources are compiled once for each instruction set (REGARD_ISA), with that
// set's flags: everything is in anonymous namespaces, and each source exports one table.
#pragma once
#include <math.h>
#include <stdint.h>

// for (int i = 0; i < count; ++i), the count a small constant: no loop is left of it.
#define UNROLLED(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); ++i)

#ifdef __AVX2__
#include "simd/avx2.h"
#else
#include "simd/generic.h"
#endif

#include "kernels/kernels.h"

using namespace regard;

// The type of a lane.
template <class V>
using Number = typename V::Scalar;

#define REGARD_JOIN(a, b) a##_##b
#define REGARD_SYMBOL(table, isa) REGARD_JOIN(table, isa)
// The name of a table of this instruction set: regard_forward_avx2, ...
#define REGARD_TABLE(family) REGARD_SYMBOL(regard_##family, REGARD_ISA)

// An entry for each DType, in its order.
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
}
