// Which kernel fills a slot on this machine.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

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

// Those that the library was built for, which may be fewer: isa.cmake.
bool is_built(std::string_view isa) {
  static constexpr std::string_view built[] = {TRANSFORMER_OPS_ISAS};
  return std::find(std::begin(built), std::end(built), isa) != std::end(built);
}

const char* choose() {
  const char* requested = std::getenv("TRANSFORMER_OPS_ISA");
  std::string usable;
  for (const Isa& isa : isas()) {
    if (!has_isa(isa.name)) continue;
    if (requested == nullptr || std::string_view(isa.name) == requested) return isa.name;
    usable += (usable.empty() ? "" : ", ") + std::string(isa.name);
  }
  if (usable.empty()) {
    throw std::runtime_error(
        "[kernels] the library must be built for an instruction set of this machine "
        "(TRANSFORMER_OPS_NATIVE=OFF builds it for all), got one for none of them");
  }
  throw std::runtime_error(
      "[kernels] TRANSFORMER_OPS_ISA must be one that this machine has and the library was built "
      "for (" +
      usable + "), got " + requested);
}

}  // namespace

bool runs_isa(std::string_view name) {
  return std::any_of(isas().begin(), isas().end(),
                     [&](const Isa& isa) { return isa.runs_here && isa.name == name; });
}

bool has_isa(std::string_view name) { return is_built(name) && runs_isa(name); }

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
