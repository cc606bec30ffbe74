// Scaling of the elements whose mask bit is set.
#pragma once

#include "loops.h"

namespace transformer_ops::cpu {
namespace {

// out = in * scale where the mask has a bit, else 0.
template <class T>
void scale_masked(const T* in, const uint8_t* mask, T* out, Acc<T> scale, int64_t n) {
  const auto f = [=](Vec<T> v, uint64_t bits) __attribute__((always_inline)) {
    return where_bits(bits, v * Vec<T>(scale));
  };
  const auto read = [=](int64_t start, int64_t count, BitBlock& block) {
    read_bits(mask, start, count, block);
  };
  map_bits(
      out, n, f, read, [](int64_t, int64_t, const BitBlock&) {}, in);
}

}  // namespace
}  // namespace transformer_ops::cpu
