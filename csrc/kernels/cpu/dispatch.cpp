// Which kernel fills a slot on this machine.
#include <algorithm>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>

#include "kernels/cpu.h"

namespace transformer_ops::cpu {
namespace {

struct Isa {
  const char* name;
  bool runs_here;
};

// Widest first.
std::span<const Isa> isas() {
#if defined(__x86_64__)
  // Every machine with AVX2 and FMA has F16C, which clang 14 does not know by name here.
  __builtin_cpu_init();
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const Isa all[] = {{"avx512", avx512}, {"avx2", avx2}, {"default", true}};
#else
  static const Isa all[] = {{"default", true}};
#endif
  return all;
}

// A build may leave out what the machine cannot run that it was made on.
bool is_built(const Isa& isa) {
  const auto [begin, end] = kernel::rows_of_this_library();
  return std::any_of(begin, end,
                     [&](const auto& row) { return row.backend == std::string_view(isa.name); });
}

const char* choose() {
  if (const char* requested = std::getenv("TRANSFORMER_OPS_ISA")) {
    for (const Isa& isa : isas()) {
      if (isa.runs_here && is_built(isa) && std::string_view(isa.name) == requested) {
        return isa.name;
      }
    }
    throw std::runtime_error(
        std::string("[kernels] TRANSFORMER_OPS_ISA must be default, avx2 or avx512, supported by "
                    "this machine and by the one that built the library, got ") +
        requested);
  }
  for (const Isa& isa : isas()) {
    if (isa.runs_here && is_built(isa)) return isa.name;
  }
  return "default";
}

}  // namespace

bool has_isa(std::string_view name) {
  for (const Isa& isa : isas()) {
    if (isa.runs_here && isa.name == name) return true;
  }
  return false;
}

const char* isa_name() {
  static const char* const chosen = choose();
  return chosen;
}

const kernel::Row& find_for(std::string_view isa, const char* slot) {
  bool lower = false;
  for (const Isa& next : isas()) {
    lower = lower || next.name == isa;
    if (!lower) continue;
    if (const auto* found = kernel::find(kernel::rows_of_this_library(), slot, next.name)) {
      return *found;
    }
  }
  throw std::runtime_error("[kernels] " + std::string(slot) + " must have a CPU kernel for " +
                           std::string(isa) + " or a lower instruction set, got none");
}

const kernel::Row& find(const char* slot) { return find_for(isa_name(), slot); }

}  // namespace transformer_ops::cpu
