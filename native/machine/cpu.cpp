#include "machine/cpu.h"

#include <atomic>

namespace regard {
namespace {

struct Entry {
  const Kernels* kernels;
  bool (*can_run)();
  bool by_default;  // false for `wide`, which only tests use
};

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

const Entry kEntries[] = {
#ifdef REGARD_HAVE_AVX512
    {&regard_kernels_avx512, has_avx512, true},
#endif
#ifdef REGARD_HAVE_AVX2
    {&regard_kernels_avx2, has_avx2, true},
#endif
    {&regard_kernels_generic, always, true},
#ifdef REGARD_HAVE_WIDE
    {&regard_kernels_wide, always, false},
#endif
};

const Kernels* default_kernels() {
  for (const Entry& e : kEntries)
    if (e.by_default && e.can_run()) return e.kernels;
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

}  // namespace regard
