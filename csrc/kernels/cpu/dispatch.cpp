// Chooses the table of kernels for this machine.
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>

#include "tables.h"

namespace transformer_ops::cpu {
namespace {

struct Choice {
  const Kernels* table;
  bool runs_here;
};

// Widest first.
std::span<const Choice> choices() {
#if defined(__x86_64__)
  // Every machine with AVX2 and FMA has F16C, which clang 14 does not know by name here.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  static const Choice all[] = {
      {&kernels_avx512, avx512}, {&kernels_avx2, avx2}, {&kernels_default, true}};
#else
  static const Choice all[] = {{&kernels_default, true}};
#endif
  return all;
}

const Kernels& choose() {
  if (const char* requested = std::getenv("TRANSFORMER_OPS_ISA")) {
    if (const Kernels* table = kernels_for(requested)) return *table;
    throw std::runtime_error(
        std::string("[kernels] TRANSFORMER_OPS_ISA must be default, avx2 or avx512, and supported "
                    "by this machine, got ") +
        requested);
  }
  for (const Choice& choice : choices()) {
    if (choice.runs_here) return *choice.table;
  }
  return kernels_default;
}

}  // namespace

const Kernels* kernels_for(std::string_view isa) {
  for (const Choice& choice : choices()) {
    if (choice.runs_here && isa == choice.table->isa) return choice.table;
  }
  return nullptr;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const char* isa_name() { return kernels().isa; }

}  // namespace transformer_ops::cpu
