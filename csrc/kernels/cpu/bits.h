// Bit masks, one bit an element, to and from one flag byte an element.
#pragma once

#include "dtype.h"

namespace transformer_ops::cpu {
namespace {

// Flag bytes of 0 and 1 to bits; flags has room up to the next multiple of 8.
TRANSFORMER_OPS_INLINE void pack_bits(uint8_t* flags, uint8_t* mask, int64_t n) {
  const int64_t bytes = (n + 7) / 8;
  for (int64_t i = n; i < bytes * 8; ++i) flags[i] = 0;
  for (int64_t i = 0; i < bytes; ++i) {
    uint64_t eight;
    memcpy(&eight, flags + 8 * i, 8);
    mask[i] = static_cast<uint8_t>((eight * 0x0102040810204080u) >> 56);  // gathers bit 0 of each
  }
}

// Bits to flag bytes, zero or not zero; flags has room up to the next multiple of 8.
TRANSFORMER_OPS_INLINE void unpack_bits(const uint8_t* mask, uint8_t* flags, int64_t n) {
  const int64_t bytes = (n + 7) / 8;
  for (int64_t i = 0; i < bytes; ++i) {
    const uint64_t eight = (mask[i] * 0x0101010101010101u) & 0x8040201008040201u;
    memcpy(flags + 8 * i, &eight, 8);
  }
}

}  // namespace
}  // namespace transformer_ops::cpu
