// Chooses the scales of blocks whose largest number becomes 6 or 4, with sums in the order given in
// kernels/encoding.h. Blocks are 16 numbers of a row or of a column, or 16 x 16.
#pragma once

#include "kernels/cuda/encode.h"

namespace transformer_ops::cuda {
namespace {

using encoding::ScaleChoice;

// The error sums for the two scales.
struct Errors {
  float six = 0.0f, four = 0.0f;

  __device__ __forceinline__ void add(const encoding::ErrorRule& rule, float x,
                                      const ScaleChoice& scales) {
    using encoding::E2M1;
    const auto error = [&](const encoding::BlockScale& scale) {
      const float value = encoding::decode<E2M1>(encoding::encode<E2M1>(x, scale.encode));
      return encoding::rounding_error(rule, x, value, scale.number);
    };
    six += error(scales.six);
    four += error(scales.four);
  }
  __device__ __forceinline__ void add(const Errors& other) {
    six += other.six;
    four += other.four;
  }
  // The errors of the lane at this distance. All lanes of a warp must call it.
  __device__ __forceinline__ Errors of_lane(int distance) const {
    return {__shfl_xor_sync(0xffffffffu, six, distance),
            __shfl_xor_sync(0xffffffffu, four, distance)};
  }
};

TRANSFORMER_OPS_DEVICE encoding::BlockScale chosen(const ScaleChoice& scales, const Errors& sums) {
  return encoding::takes_four(sums.six, sums.four) ? scales.four : scales.six;
}

// The sums of 16 numbers of a row, of which two adjacent lanes have 8 each. Both lanes get them.
template <class T>
TRANSFORMER_OPS_DEVICE Errors sums_of_row(const encoding::ErrorRule& rule,
                                          const ScaleChoice& scales, const Pack<T, kPack>& x) {
  const auto add_own = [&](Errors& sums) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) sums.add(rule, to_number(x[j]), scales);
  };
  Errors own;
  add_own(own);
  // The second lane continues the sums of the first.
  Errors whole = own.of_lane(1);
  const bool is_second = threadIdx.x % 2 == 1;
  if (is_second) add_own(whole);
  const Errors other = whole.of_lane(1);
  return is_second ? whole : other;
}

// The sums of 16 x 16 numbers, of which two lanes of a warp have a row each.
template <class T>
TRANSFORMER_OPS_DEVICE Errors sums_of_square(const encoding::ErrorRule& rule,
                                             const ScaleChoice& scales, const Pack<T, kPack>& x) {
  static_assert(kWarp == 32 && kPack == 8);
  Errors sums = sums_of_row(rule, scales, x);
  for (int distance = kWarp / 2; distance > 1; distance /= 2) sums.add(sums.of_lane(distance));
  return sums;
}

// The scale of a block with this largest magnitude; each lane has a pack of the block.
template <class T>
TRANSFORMER_OPS_DEVICE encoding::BlockScale choose_for_row(const encoding::ErrorRule& rule,
                                                           uint32_t amax, float tensor_scale,
                                                           const Pack<T, kPack>& x) {
  const ScaleChoice scales = encoding::scale_choice(encoding::from_bits(amax), tensor_scale);
  return chosen(scales, sums_of_row(rule, scales, x));
}
template <class T>
TRANSFORMER_OPS_DEVICE encoding::BlockScale choose_for_square(const encoding::ErrorRule& rule,
                                                              uint32_t amax, float tensor_scale,
                                                              const Pack<T, kPack>& x) {
  const ScaleChoice scales = encoding::scale_choice(encoding::from_bits(amax), tensor_scale);
  return chosen(scales, sums_of_square(rule, scales, x));
}

// The scales of 8 columns with these largest magnitudes; row_of(row) returns a pack of each row.
template <class Row>
TRANSFORMER_OPS_DEVICE void choose_columns(const encoding::ErrorRule& rule,
                                           const uint32_t (&amax)[kPack], float tensor_scale,
                                           int64_t first, int64_t end, const Row& row_of,
                                           encoding::BlockScale (&scales)[kPack]) {
  ScaleChoice choices[kPack];
  Errors sums[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    choices[j] = encoding::scale_choice(encoding::from_bits(amax[j]), tensor_scale);
  }
  for (int64_t row = first; row < end; ++row) {
    const auto x = row_of(row);
#pragma unroll
    for (int j = 0; j < kPack; ++j) sums[j].add(rule, to_number(x[j]), choices[j]);
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) scales[j] = chosen(choices[j], sums[j]);
}

}  // namespace
}  // namespace transformer_ops::cuda
