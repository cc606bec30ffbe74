// Draws which elements dropout keeps, with a counter-based generator: any range can be drawn
// separately, and repeatedly.
#pragma once

#include "kernels/random.h"
#include "loops.h"
#include "philox.h"

namespace transformer_ops::cpu {
namespace {

using random::dropout_scale;
using random::keep_threshold;

// ---- a block of elements: eight 16-bit pieces of each counter ----

struct Pieces {
  alignas(64) uint16_t piece[kBitBlock];
};

TRANSFORMER_OPS_INLINE void draw_pieces(uint64_t seed, uint64_t counter, uint32_t stream,
                                        Pieces& out) {
  for (int64_t first = 0; first < kBitBlock / 8; first += kCountersAtOnce) {
    const PhiloxNumbers numbers = philox(seed, counter + static_cast<uint64_t>(first), stream);
    for (int k = 0; k < kPhiloxChains; ++k) {
      uint16_t* to = out.piece + 8 * (first + k * kPhiloxLanes);
#if defined(__AVX512F__)
      const __m512i low = (__m512i)numbers.low[k], high = (__m512i)numbers.high[k];
      const __m512i first_four = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
      const __m512i last_four = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
      _mm512_store_si512(to, _mm512_permutex2var_epi64(low, first_four, high));
      _mm512_store_si512(to + 32, _mm512_permutex2var_epi64(low, last_four, high));
#else
      for (int lane = 0; lane < kPhiloxLanes; ++lane) {
        const uint64_t both[2] = {numbers.low[k][lane], numbers.high[k][lane]};
        memcpy(to + 8 * lane, both, sizeof(both));
      }
#endif
    }
  }
}

struct Comparison {
  uint64_t above, equal;  // a bit for each piece
};

// Compares 64 pieces with the bound.
TRANSFORMER_OPS_INLINE Comparison compare(const uint16_t* piece, uint16_t bound) {
  Comparison result{0, 0};
#if defined(__AVX512BW__)
  const __m512i bounds = _mm512_set1_epi16(static_cast<int16_t>(bound));
  for (int i = 0; i < 64; i += 32) {
    const __m512i v = _mm512_load_si512(piece + i);
    result.above |= static_cast<uint64_t>(_mm512_cmpgt_epu16_mask(v, bounds)) << i;
    result.equal |= static_cast<uint64_t>(_mm512_cmpeq_epu16_mask(v, bounds)) << i;
  }
#elif defined(__SSE2__)
  const __m128i bounds = _mm_set1_epi16(static_cast<int16_t>(bound));
  for (int i = 0; i < 64; i += 16) {
    const auto* p = reinterpret_cast<const __m128i*>(piece + i);
    const __m128i a = _mm_load_si128(p), b = _mm_load_si128(p + 1), zero = _mm_setzero_si128();
    // The unsigned v <= bound is true if the saturated difference is zero.
    const __m128i not_above = _mm_packs_epi16(_mm_cmpeq_epi16(_mm_subs_epu16(a, bounds), zero),
                                              _mm_cmpeq_epi16(_mm_subs_epu16(b, bounds), zero));
    const __m128i equal = _mm_packs_epi16(_mm_cmpeq_epi16(a, bounds), _mm_cmpeq_epi16(b, bounds));
    result.above |= static_cast<uint64_t>(~_mm_movemask_epi8(not_above) & 0xffff) << i;
    result.equal |= static_cast<uint64_t>(_mm_movemask_epi8(equal)) << i;
  }
#elif defined(__aarch64__)
  const uint16x8_t bounds = vdupq_n_u16(bound), bit = {1, 2, 4, 8, 16, 32, 64, 128};
  for (int i = 0; i < 64; i += 8) {
    const uint16x8_t v = vld1q_u16(piece + i);
    result.above |= static_cast<uint64_t>(vaddvq_u16(vcgtq_u16(v, bounds) & bit)) << i;
    result.equal |= static_cast<uint64_t>(vaddvq_u16(vceqq_u16(v, bounds) & bit)) << i;
  }
#else
  for (int i = 0; i < 64; ++i) {
    result.above |= static_cast<uint64_t>(piece[i] > bound) << i;
    result.equal |= static_cast<uint64_t>(piece[i] == bound) << i;
  }
#endif
  return result;
}

// Sets the bits of the kept elements, from element `first` on. The upper half of an element's
// random integer nearly always decides; the lower half is drawn only if it does not.
TRANSFORMER_OPS_INLINE void draw_bits(uint64_t seed, uint32_t threshold, int64_t first,
                                      BitBlock& block) {
  const auto counter = static_cast<uint64_t>(first) / 8;
  Pieces pieces;
  draw_pieces(seed, counter, 0, pieces);
  Comparison upper[kBitBlock / 64];
  uint64_t undecided = 0;
  for (int i = 0; i < kBitBlock / 64; ++i) {
    upper[i] = compare(pieces.piece + 64 * i, static_cast<uint16_t>(threshold >> 16));
    block.word[i] = upper[i].above;
    undecided |= upper[i].equal;
  }
  if (__builtin_expect(undecided == 0, 1)) return;
  draw_pieces(seed, counter, 1, pieces);
  for (int i = 0; i < kBitBlock / 64; ++i) {
    const Comparison lower = compare(pieces.piece + 64 * i, static_cast<uint16_t>(threshold));
    block.word[i] |= upper[i].equal & (lower.above | lower.equal);
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
