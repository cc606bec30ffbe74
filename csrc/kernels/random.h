// Code shared by the dropout kernels of all devices. Each element has its own random 32-bit
// integer, from Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011). Seven rounds are the fewest that pass TestU01's BigCrush (there, table 2).
//
// Everything has internal linkage, for the reason given in math.h.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TRANSFORMER_OPS_RANDOM static __host__ __device__ __forceinline__
#else
#define TRANSFORMER_OPS_RANDOM [[maybe_unused]] static inline __attribute__((always_inline))
#endif

namespace transformer_ops::random {
namespace {

constexpr int kRounds = 7;
constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

struct Words {
  uint32_t word[4];
};

// The 128 bits of the counter (low, high).
TRANSFORMER_OPS_RANDOM Words philox(uint64_t key, uint64_t low, uint64_t high) {
  uint32_t c0 = static_cast<uint32_t>(low), c1 = static_cast<uint32_t>(low >> 32);
  uint32_t c2 = static_cast<uint32_t>(high), c3 = static_cast<uint32_t>(high >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kMultiplier0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kMultiplier1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// An element is kept if its random integer is at least p * 2^32.
[[maybe_unused]] uint32_t keep_threshold(double p) {
  const double exact = p * 4294967296.0;
  const auto below = static_cast<uint64_t>(exact);
  const uint64_t threshold = static_cast<double>(below) < exact ? below + 1 : below;
  return static_cast<uint32_t>(threshold < 0xffffffffu ? threshold : 0xffffffffu);
}

// With p = 1 nothing is kept, and any finite scale is correct.
[[maybe_unused]] double dropout_scale(double p) { return p < 1.0 ? 1.0 / (1.0 - p) : 0.0; }

}  // namespace
}  // namespace transformer_ops::random
