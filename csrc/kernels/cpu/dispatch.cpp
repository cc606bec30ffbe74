// Detects the processor's instruction sets, and selects the kernel of a slot.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "kernels/cpu.h"

namespace transformer_ops::cpu {
namespace {

// A processor of a level has everything that the lower levels have.
struct Level {
  const char* name;
  const char* kernels;  // the instruction set that they are compiled for
  bool runs_here;
};

#if defined(__x86_64__)
// Clang before 18 does not know it by name.
bool has_avx512_fp16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & bit_AVX512FP16) != 0;
}
#endif

// The widest level is first.
std::span<const Level> levels() {
#if defined(__x86_64__)
  // Every machine with AVX2 and FMA has F16C, which clang 14 does not know by name here.
  __builtin_cpu_init();
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool bfloat16 = avx512 && __builtin_cpu_supports("avx512bf16");
  static const bool half = bfloat16 && has_avx512_fp16();
  static const Level all[] = {{"avx512_fp16", "avx512", half},
                              {"avx512_bf16", "avx512", bfloat16},
                              {"avx512", "avx512", avx512},
                              {"avx2", "avx2", avx2},
                              {"default", "default", true}};
#elif defined(__aarch64__)
  constexpr unsigned long kBfloat16 = 1 << 14;  // HWCAP2_BF16, which older headers do not have
  static const bool bfloat16 = (getauxval(AT_HWCAP2) & kBfloat16) != 0;
  static const Level all[] = {{"neon_bf16", "default", bfloat16}, {"default", "default", true}};
#else
  static const Level all[] = {{"default", "default", true}};
#endif
  return all;
}

// Was the library built for the instruction set? See isa.cmake.
bool is_built(std::string_view isa) {
  static constexpr std::string_view built[] = {TRANSFORMER_OPS_ISAS};
  return std::find(std::begin(built), std::end(built), isa) != std::end(built);
}

std::span<const Level> from(const Level& level) {
  return levels().subspan(&level - levels().data());
}

// The kernels of that level or of the next lower one that was built; null if there are none.
const char* kernels_for(const Level& level) {
  for (const Level& next : from(level)) {
    if (is_built(next.kernels)) return next.kernels;
  }
  return nullptr;
}

// The levels that this machine has and that there are kernels for.
std::vector<const Level*> usable_levels() {
  std::vector<const Level*> usable;
  for (const Level& level : levels()) {
    if (level.runs_here && kernels_for(level) != nullptr) usable.push_back(&level);
  }
  return usable;
}

const Level& choose_level() {
  const char* const requested = std::getenv("TRANSFORMER_OPS_ISA");
  std::string names;
  for (const Level* level : usable_levels()) {
    if (requested == nullptr || std::string_view(level->name) == requested) return *level;
    names += (names.empty() ? "" : ", ") + std::string(level->name);
  }
  if (names.empty()) {
    throw std::runtime_error(
        "[kernels] the library must be built for an instruction set of this machine "
        "(TRANSFORMER_OPS_NATIVE=OFF builds it for all), got one for none of them");
  }
  throw std::runtime_error(
      "[kernels] TRANSFORMER_OPS_ISA must be one that this machine has and the library was built "
      "for (" +
      names + "; TRANSFORMER_OPS_NATIVE=OFF builds it for all), got " + requested);
}

Processor find_processor() {
  const Level& level = choose_level();
  [[maybe_unused]] const auto reaches = [&](std::string_view name) {
    return std::ranges::any_of(from(level), [&](const Level& next) { return next.name == name; });
  };
  Processor found{};
  found.level = level.name;
  found.kernels = kernels_for(level);
#if defined(__x86_64__)
  found.multiplies_bfloat16 = reaches("avx512_bf16");
  found.multiplies_half = reaches("avx512_fp16");
  found.onednn_emulates_bfloat16 = reaches("avx512") && !found.multiplies_bfloat16;
  found.converts_half = reaches("avx2");
  found.prefers_onednn = reaches("avx512") && __builtin_cpu_is("amd");  // measured on a Zen 4
#elif defined(__aarch64__)
  // PyTorch calls oneDNN there for bfloat16 if the processor multiplies it, and never for float16.
  // Which road is faster was not measured on such a processor.
  found.multiplies_bfloat16 = reaches("neon_bf16");
  found.converts_half = true;
#else
  found.multiplies_bfloat16 = found.multiplies_half = found.converts_half = true;
#endif
  return found;
}

}  // namespace

const Processor& processor() {
  static const Processor found = find_processor();
  return found;
}

std::vector<std::string> processor_levels() {
  std::vector<std::string> names;
  for (const Level* level : usable_levels()) names.emplace_back(level->name);
  return names;
}

bool has_isa(std::string_view isa) {
  return is_built(isa) && std::ranges::any_of(levels(), [&](const Level& level) {
           return level.runs_here && level.kernels == isa;
         });
}

const kernel::Row& find_for(std::string_view isa, const char* slot) {
  bool lower = false;
  for (const Level& next : levels()) {
    lower = lower || next.kernels == isa;
    if (!lower) continue;
    if (const auto* found = kernel::find(kernel::rows_of_this_library(), slot, next.kernels)) {
      return *found;
    }
  }
  throw std::runtime_error("[kernels] " + std::string(slot) + " must have a CPU kernel for " +
                           std::string(isa) + " or a lower instruction set, got none");
}

const kernel::Row& find(const char* slot) { return find_for(processor().kernels, slot); }

}  // namespace transformer_ops::cpu
