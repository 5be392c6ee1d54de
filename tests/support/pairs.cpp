// Runs the operations on pairs of bfloat16 numbers (native/simd) on numbers of all kinds and compares
// each result with its definition. Writes the results to stdout; NaN as one bit pattern. The exit code
// is 1 if a result is wrong.
#include <cmath>
#include <cstdio>
#include <vector>

#include "kernels/isa.h"

namespace {

constexpr int N = Pairs::N, kRounds = 40000;
uint64_t state = 1;
int faults = 0;
std::vector<uint32_t> results;

uint32_t random_bits() {
  state += 0x9E3779B97F4A7C15u;
  uint64_t x = state;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return static_cast<uint32_t>(x ^ x >> 31);
}

// Returns float bits: random, with an exponent of middle size, close to underflow, or special.
uint32_t random_float(int kind) {
  constexpr uint32_t special[] = {0,          0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000,
                                  0x00000001, 0x80010000, 0x007FFFFF, 0x00800000, 0x3F800000,
                                  0x7F7FFFFF, 0x3F808000, 0x3F818000};
  const uint32_t x = random_bits(), rest = x & 0x807FFFFF;
  if (kind == 1) return rest | (115 + random_bits() % 24) << 23;
  if (kind == 2) return rest | (random_bits() % 70) << 23;
  return kind == 3 ? special[random_bits() % 13] : x;
}

uint32_t random_word(int kind) { return random_float(kind) >> 16 | (random_float(kind) & 0xFFFF0000); }

float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
float even_of(uint32_t word) { return as<float>(word << 16); }
float odd_of(uint32_t word) { return as<float>(word & 0xFFFF0000); }
uint32_t rounded(float x) {
  BHalf half;
  from_float(&half, flush(x));
  return half.bits;
}

void check(uint32_t result, uint32_t expected) {
  const bool nan = std::isnan(as<float>(result)) && std::isnan(as<float>(expected));
  faults += !nan && result != expected;
  results.push_back(nan ? 0x7FC00000 : result);
}

void check_fma(int kind) {
  uint32_t a[N], b[N], c[N];
  float got[N];
  for (int i = 0; i < N; ++i) a[i] = random_word(kind), b[i] = random_word(kind), c[i] = random_float(kind);
  const Floats sum =
      fma(Lanes<Pairs>::load(a), Lanes<Pairs>::load(b), Lanes<Floats>::load(reinterpret_cast<float*>(c)));
  Lanes<Floats>::store(got, sum);
  for (int i = 0; i < N; ++i) {
    const float odd = flush(std::fma(flush(odd_of(a[i])), flush(odd_of(b[i])), flush(as<float>(c[i]))));
    check(as<uint32_t>(got[i]),
          as<uint32_t>(flush(std::fma(flush(even_of(a[i])), flush(even_of(b[i])), odd))));
  }
}

// Compares words half by half, because a half may be NaN.
void check_words(Pairs words, const uint32_t (&halves)[2 * N]) {
  uint32_t got[N];
  Lanes<Pairs>::store(got, words);
  for (int i = 0; i < 2 * N; ++i)
    check((i & 1 ? got[i / 2] & 0xFFFF0000 : got[i / 2] << 16), halves[i] << 16);
}

void check_rounding(int kind) {
  float x[N], y[N];
  for (int i = 0; i < N; ++i) x[i] = as<float>(random_float(kind)), y[i] = as<float>(random_float(kind));
  uint32_t paired[2 * N], narrowed[2 * N];
  for (int i = 0; i < N; ++i) {
    paired[2 * i] = narrowed[i] = rounded(x[i]);
    paired[2 * i + 1] = narrowed[N + i] = rounded(y[i]);
  }
  const Floats u = Lanes<Floats>::load(x), v = Lanes<Floats>::load(y);
  check_words(pair(u, v), paired);
  check_words(narrow(u, v), narrowed);
}

void check_order() {
  BHalf x[N], y[N];
  uint32_t mixed[2 * N], square[N][N], got[N];
  for (int i = 0; i < N; ++i) {
    mixed[2 * i] = x[i].bits = static_cast<uint16_t>(random_bits());
    mixed[2 * i + 1] = y[i].bits = static_cast<uint16_t>(random_bits());
  }
  check_words(interleave(x, y), mixed);
  Pairs rows[N];
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < N; ++j) square[i][j] = random_bits();
    rows[i] = Lanes<Pairs>::load(square[i]);
  }
  transpose(rows);
  for (int i = 0; i < N; ++i) {
    Lanes<Pairs>::store(got, rows[i]);
    for (int j = 0; j < N; ++j) check(got[j], square[j][i]);
    float low[N], high[N];
    Lanes<Floats>::store(low, even(rows[i]));
    Lanes<Floats>::store(high, odd(rows[i]));
    for (int j = 0; j < N; ++j) {
      check(as<uint32_t>(low[j]), square[j][i] << 16);
      check(as<uint32_t>(high[j]), square[j][i] & 0xFFFF0000);
    }
  }
}

}  // namespace

int main() {
  for (int round = 0; round < kRounds; ++round)
    for (int kind = 0; kind < 4; ++kind) {
      check_fma(kind);
      check_rounding(kind);
      if (round % 100 == 0) check_order();
    }
  std::fwrite(results.data(), sizeof(uint32_t), results.size(), stdout);
  std::fprintf(stderr, "%d of %zu results are wrong\n", faults, results.size());
  return faults > 0;
}
