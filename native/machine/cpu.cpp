#include "machine/cpu.h"

#include <time.h>

#include <algorithm>
#include <atomic>

namespace regard {
namespace {

struct Entry {
  const Kernels* kernels;
  bool (*can_run)();
  const char* (*objection)();  // why it is not used by default although the CPU supports it, or null
};

const char* none() { return nullptr; }
#ifdef REGARD_HAVE_WIDE
const char* tests_only() { return "only tests use it"; }
#endif

bool always() { return true; }

// The builtins check CPUID and that the operating system saves the vector registers.
#ifdef REGARD_HAVE_AVX2
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif
#ifdef REGARD_HAVE_AVX512
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif
#ifdef REGARD_HAVE_AVX512BF16
// Products of pairs must be this much faster than fma to be used.
constexpr double kGain = 1.4;

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Returns the best rate of products of pairs, divided by that of fma. The CPUs that have both do
// either about as many or twice as many operations in pairs. Takes about 50 microseconds.
double gain_of_pairs() {
  const Kernels& k = regard_kernels_avx512bf16;
  double best[2] = {0, 0};
  for (int i = 0; i < 40; ++i) {
    const double start = seconds(), flops = (i & 1 ? k.bfloat16_probe : k.fma_probe)(256);
    best[i & 1] = std::max(best[i & 1], flops / (seconds() - start));
  }
  return best[1] / best[0];
}

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

const char* pairs_are_slow() {
  static const bool fast = gain_of_pairs() >= kGain;
  return fast ? nullptr : "products of bfloat16 pairs are not faster than float's on this CPU";
}
#endif

// In order of preference.
const Entry kEntries[] = {
#ifdef REGARD_HAVE_AVX512BF16
    {&regard_kernels_avx512bf16, has_avx512bf16, pairs_are_slow},
#endif
#ifdef REGARD_HAVE_AVX512
    {&regard_kernels_avx512, has_avx512, none},
#endif
#ifdef REGARD_HAVE_AVX2
    {&regard_kernels_avx2, has_avx2, none},
#endif
    {&regard_kernels_generic, always, none},
#ifdef REGARD_HAVE_WIDE
    {&regard_kernels_wide, always, tests_only},
#endif
};

const Kernels* default_kernels() {
  for (const Entry& e : kEntries)
    if (e.can_run() && !e.objection()) return e.kernels;
  return &regard_kernels_generic;
}

std::atomic<const Kernels*> active{nullptr};

}  // namespace

std::vector<std::string> instruction_sets(bool runnable) {
  std::vector<std::string> names;
  for (const Entry& e : kEntries)
    if (!runnable || e.can_run()) names.push_back(e.kernels->name);
  return names;
}

std::string objection(const std::string& name) {
  for (const Entry& e : kEntries)
    if (name == e.kernels->name) {
      const char* why = e.can_run() ? e.objection() : "the CPU does not support it";
      return why ? why : "";
    }
  return "it is not compiled";
}

const Kernels& kernels() {
  const Kernels* table = active.load(std::memory_order_relaxed);
  if (!table) active.store(table = default_kernels(), std::memory_order_relaxed);
  return *table;
}

int panel_rows(DType dtype) { return dtype == kFloat64 ? kernels().panel_double : kernels().panel_float; }

bool use(const std::string& name) {
  for (const Entry& e : kEntries)
    if (name == e.kernels->name && e.can_run()) {
      active.store(e.kernels);
      return true;
    }
  return false;
}

bool multiplies_pairs(DType dtype) { return dtype == kBFloat16 && kernels().pairs; }

double fma_probe(int64_t rounds, bool bfloat16) {
  return (bfloat16 ? kernels().bfloat16_probe : kernels().fma_probe)(rounds);
}

}  // namespace regard
