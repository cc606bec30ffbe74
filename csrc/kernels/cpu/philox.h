// The Philox4x32 generator of kernels/random.h on vectors of counters.
#pragma once

#include "dtype.h"
#include "kernels/random.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace transformer_ops::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kPhiloxLanes = 8;
#elif defined(__AVX2__)
constexpr int kPhiloxLanes = 4;
#else
constexpr int kPhiloxLanes = 2;
#endif

typedef uint64_t PhiloxLanes __attribute__((vector_size(8 * kPhiloxLanes)));

// Multiplies the low halves to 64 bits. Compilers do not find this instruction themselves.
TRANSFORMER_OPS_INLINE PhiloxLanes multiply(PhiloxLanes a, uint32_t b) {
#if defined(__AVX512F__)
  // The masked form is used for all lanes, because gcc 12 warns about an uninitialized value in the
  // plain one.
  return (PhiloxLanes)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (PhiloxLanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (PhiloxLanes)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#elif defined(__aarch64__)
  return vmull_u32(vmovn_u64(a), vdup_n_u32(b));
#else
  return (a & 0xffffffffu) * static_cast<uint64_t>(b);
#endif
}

// Independent chains hide the latency of the multiplications.
#if defined(__AVX512F__)
constexpr int kPhiloxChains = 4;
#else
constexpr int kPhiloxChains = 2;
#endif
constexpr int kCountersAtOnce = kPhiloxChains * kPhiloxLanes;

// The 128 bits of each counter, as low and high half.
struct PhiloxNumbers {
  PhiloxLanes low[kPhiloxChains], high[kPhiloxChains];
};

// The numbers of the counters (counter + i, stream, 0) for i < kCountersAtOnce. The state is four
// 32-bit words, each in the low half of a lane; the high halves may hold anything in between.
TRANSFORMER_OPS_INLINE PhiloxNumbers philox(uint64_t seed, uint64_t counter, uint32_t stream) {
  PhiloxLanes c0[kPhiloxChains], c1[kPhiloxChains], c2[kPhiloxChains], c3[kPhiloxChains];
  PhiloxLanes index = {};
  for (int i = 0; i < kPhiloxLanes; ++i) index[i] = static_cast<uint64_t>(i);
  for (int k = 0; k < kPhiloxChains; ++k) {
    c0[k] = index + (counter + static_cast<uint64_t>(k * kPhiloxLanes));
    c1[k] = c0[k] >> 32;
    c2[k] = PhiloxLanes{} + stream;
    c3[k] = PhiloxLanes{};
  }
  auto k0 = static_cast<uint32_t>(seed);
  auto k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < random::kRounds; ++round) {
    for (int k = 0; k < kPhiloxChains; ++k) {
      const PhiloxLanes p0 = multiply(c0[k], random::kMultiplier0);
      const PhiloxLanes p1 = multiply(c2[k], random::kMultiplier1);
      c0[k] = (p1 >> 32) ^ c1[k] ^ static_cast<uint64_t>(k0);
      c1[k] = p1;
      c2[k] = (p0 >> 32) ^ c3[k] ^ static_cast<uint64_t>(k1);
      c3[k] = p0;
    }
    k0 += random::kWeyl0;
    k1 += random::kWeyl1;
  }
  PhiloxNumbers numbers;
  const PhiloxLanes word = PhiloxLanes{} + 0xffffffffu;
  for (int k = 0; k < kPhiloxChains; ++k) {
    numbers.low[k] = (c0[k] & word) | (c1[k] << 32);
    numbers.high[k] = (c2[k] & word) | (c3[k] << 32);
  }
  return numbers;
}

}  // namespace
}  // namespace transformer_ops::cpu
