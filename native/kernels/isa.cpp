// The kernel table of one instruction set, and probes that measure the machine's peak arithmetic
// throughput and memory bandwidth.
#include "kernels/isa.h"

#include "kernels/pack.inl.h"

namespace {

// Runs independent chains of products in registers: sum[i] = multiply(sum[i]). Returns the number of
// floating point operations if a product of two vectors takes `flops`.
template <class Multiply>
double product_probe(int64_t rounds, int flops, Multiply multiply) {
  constexpr int kChains = 16;  // enough to start products at full rate
  Floats sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = Lanes<Floats>::set(static_cast<float>(i));
  for (int64_t n = 0; n < rounds; ++n)
    UNROLLED (i, kChains) sum[i] = multiply(sum[i]);
  float check[Floats::N];
  for (int i = 1; i < kChains; ++i) sum[0] = sum[0] + sum[i];
  Lanes<Floats>::store(check, sum[0]);
  return check[0] == 12345.0f ? 0.0 : static_cast<double>(flops * kChains) * static_cast<double>(rounds);
}

double fma_probe(int64_t rounds) {
  const Floats a = Lanes<Floats>::set(0.999f), b = Lanes<Floats>::set(0.001f);
  return product_probe(rounds, 2 * Floats::N, [=](Floats sum) { return fma(sum, a, b); });
}

#ifdef REGARD_PAIRS
constexpr bool kPairs = true;
double bfloat16_probe(int64_t rounds) {
  const Floats x = Lanes<Floats>::set(0.01f);
  const Pairs a = pair(x, x);
  return product_probe(rounds, 4 * Floats::N, [=](Floats sum) { return fma(a, a, sum); });
}
#else
constexpr bool kPairs = false;
double bfloat16_probe(int64_t rounds) { return fma_probe(rounds); }
#endif

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

#define REGARD_POINTERS(base, bfloat16) {&base[0], &base[1], &bfloat16[2], &base[3]}
#define REGARD_OWN(family) REGARD_POINTERS(REGARD_BASE_TABLE(family), REGARD_TABLE(family))
#define REGARD_SHARED(family) REGARD_POINTERS(REGARD_BASE_TABLE(family), REGARD_BASE_TABLE(family))

const Kernels REGARD_TABLE(kernels) = {
    REGARD_NAME(REGARD_ISA),
    kPanel<Floats>,
    kPanel<Doubles>,
    kPairs,
    REGARD_OWN(forward),
    REGARD_SHARED(decode),
    REGARD_OWN(backward),
    REGARD_SHARED(write),
    REGARD_SHARED(linear),
    REGARD_SHARED(linear_gradients),
    REGARD_OWN(evidence),
    REGARD_SHARED(projection),
    fma_probe,
    bfloat16_probe,
    read_probe,
};
