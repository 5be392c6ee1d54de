// The kernel table of one instruction set, and probes that measure the machine's peak arithmetic
// throughput and memory bandwidth.
#include "kernels/isa.h"

#include "kernels/pack.inl.h"

namespace {

// Runs independent chains of multiply-adds in registers. Returns the number of floating point
// operations.
double fma_probe(int64_t rounds) {
  constexpr int kChains = 12;
  Floats sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = Lanes<Floats>::set(static_cast<float>(i));
  const Floats a = Lanes<Floats>::set(0.999f), b = Lanes<Floats>::set(0.001f);
  for (int64_t n = 0; n < rounds; ++n)
    UNROLLED (i, kChains) sum[i] = fma(sum[i], a, b);
  float check[Floats::N];
  for (int i = 1; i < kChains; ++i) sum[0] = sum[0] + sum[i];
  Lanes<Floats>::store(check, sum[0]);
  return check[0] == 12345.0f ? 0.0 : 2.0 * Floats::N * kChains * static_cast<double>(rounds);
}

// Reads every float once. Returns their sum, so that the compiler keeps the loads.
double read_probe(const float* data, int64_t count) {
  Floats sum[4] = {Lanes<Floats>::zero(), Lanes<Floats>::zero(), Lanes<Floats>::zero(),
                   Lanes<Floats>::zero()};
  for (int64_t i = 0; i + 4 * Floats::N <= count; i += 4 * Floats::N)
    for (int j = 0; j < 4; ++j) sum[j] = sum[j] + Lanes<Floats>::load(data + i + j * Floats::N);
  float out[Floats::N];
  Lanes<Floats>::store(out, sum[0] + sum[1] + sum[2] + sum[3]);
  double total = 0;
  for (int i = 0; i < Floats::N; ++i) total += static_cast<double>(out[i]);
  return total;
}

}  // namespace

#define REGARD_TEXT(a) #a
#define REGARD_NAME(isa) REGARD_TEXT(isa)

const Kernels REGARD_TABLE(kernels) = {
    REGARD_NAME(REGARD_ISA),
    kPanel<Floats>,
    kPanel<Doubles>,
    REGARD_TABLE(forward),
    REGARD_TABLE(decode),
    REGARD_TABLE(backward),
    REGARD_TABLE(write),
    REGARD_TABLE(linear),
    REGARD_TABLE(linear_gradients),
    REGARD_TABLE(evidence),
    REGARD_TABLE(projection),
    fma_probe,
    read_probe,
};
