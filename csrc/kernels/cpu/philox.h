// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on vectors
// of counters.
#pragma once

#include "dtype.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace transformer_ops::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 4;
#else
constexpr int kLanes = 2;
#endif

// The 32-bit words of Philox, each in the low half of a 64-bit lane; the high half is arbitrary.
typedef uint64_t Lanes __attribute__((vector_size(8 * kLanes)));
typedef uint32_t HalfLanes __attribute__((vector_size(4 * kLanes)));

// Low half times low half, 64 bits. Compilers do not find the instruction by themselves.
TRANSFORMER_OPS_INLINE Lanes multiply(Lanes a, uint32_t b) {
#if defined(__AVX512F__)
  // All lanes, by the masked form: gcc 12 warns of an uninitialized value in the plain one.
  return (Lanes)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (Lanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (Lanes)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xffffffffu) * static_cast<uint64_t>(b);
#endif
}

// Independent chains hide the latency of the multiplications.
constexpr int kChains = 2;
constexpr int kCountersAtOnce = kChains * kLanes;

// flags[4 i + j] = 1 where word j of counter + i is at least threshold, else 0, for
// kCountersAtOnce counters.
TRANSFORMER_OPS_INLINE void philox_flags(uint64_t seed, uint64_t counter, uint32_t threshold,
                                         uint8_t* flags) {
  Lanes c0[kChains], c1[kChains], c2[kChains], c3[kChains];
  Lanes index = {};
  for (int i = 0; i < kLanes; ++i) index[i] = static_cast<uint64_t>(i);
  for (int chain = 0; chain < kChains; ++chain) {
    c0[chain] = index + (counter + static_cast<uint64_t>(chain * kLanes));
    c1[chain] = c0[chain] >> 32;
    c2[chain] = c3[chain] = Lanes{};
  }
  auto k0 = static_cast<uint32_t>(seed);
  auto k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int chain = 0; chain < kChains; ++chain) {
      const Lanes p0 = multiply(c0[chain], 0xD2511F53u);
      const Lanes p1 = multiply(c2[chain], 0xCD9E8D57u);
      c0[chain] = (p1 >> 32) ^ c1[chain] ^ static_cast<uint64_t>(k0);
      c1[chain] = p1;
      c2[chain] = (p0 >> 32) ^ c3[chain] ^ static_cast<uint64_t>(k1);
      c3[chain] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int chain = 0; chain < kChains; ++chain) {
    // word - threshold has its whole high half set where it is negative: one bit of it for each of
    // the four flag bytes.
    const Lanes low = Lanes{} + 0xffffffffu;
    const Lanes dropped = (((c0[chain] & low) - threshold) & (1ull << 32)) |
                          (((c1[chain] & low) - threshold) & (1ull << 40)) |
                          (((c2[chain] & low) - threshold) & (1ull << 48)) |
                          (((c3[chain] & low) - threshold) & (1ull << 56));
    const auto kept = __builtin_convertvector((dropped >> 32) ^ 0x01010101u, HalfLanes);
    memcpy(flags + 4 * kLanes * chain, &kept, sizeof(kept));
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
