// Compiled once for each instruction set, with that set's flags; everything but the table stays inside.
#include <math.h>
#include <stdint.h>

#ifdef __AVX2__
#include "simd/avx2.h"
#else
#include "simd/generic.h"
#endif

#include "kernels/kernels.h"

using namespace regard;

#include "kernels/backward.inl.h"
#include "kernels/decode.inl.h"
#include "kernels/encode.inl.h"
#include "kernels/evidence.inl.h"
#include "kernels/forward.inl.h"
#include "kernels/linear_gradients.inl.h"
#include "kernels/probe.inl.h"

#define REGARD_JOIN(a, b) a##b
#define REGARD_TABLE(isa) REGARD_JOIN(regard_kernels_, isa)
#define REGARD_TEXT(a) #a
#define REGARD_NAME(isa) REGARD_TEXT(isa)

extern "C" __attribute__((visibility("default"))) const Kernels REGARD_TABLE(REGARD_ISA) = {
    REGARD_NAME(REGARD_ISA),
    kPanel<Floats>,
    kPanel<Doubles>,
    {forward<Floats, float>, forward<Doubles, double>, forward<Floats, BHalf>, forward<Floats, Half>},
    {Forward<Floats, float>::scratch_bytes, Forward<Doubles, double>::scratch_bytes,
     Forward<Floats, BHalf>::scratch_bytes, Forward<Floats, Half>::scratch_bytes},
    {decode_kernels<Floats, float>(), decode_kernels<Doubles, double>(), decode_kernels<Floats, BHalf>(),
     decode_kernels<Floats, Half>()},
    {backward_kernels<Floats, float>(), backward_kernels<Doubles, double>(),
     backward_kernels<Floats, BHalf>(), backward_kernels<Floats, Half>()},
    {write_rows<float>, write_rows<double>, write_rows<BHalf>, write_rows<Half>},
    {linear_kernels<Floats, float>(), linear_kernels<Doubles, double>(), linear_kernels<Floats, BHalf>(),
     linear_kernels<Floats, Half>()},
    {evidence_kernels<Floats, float>(), evidence_kernels<Doubles, double>(),
     evidence_kernels<Floats, BHalf>(), evidence_kernels<Floats, Half>()},
    fma_probe,
    read_probe,
};
