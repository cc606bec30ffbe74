// Rounds numbers to the values of their codes, with vectors.
#pragma once

#include "codes.h"

namespace transformer_ops::cpu {
namespace {

// What is known about numbers: nothing, that they are finite, or that they are finite and, once
// scaled, at most the format's largest number.
enum class Range { Any, Finite, Fits };

// Returns the value of the NaN code for NaN, else the rounded magnitude.
template <class E>
TRANSFORMER_OPS_INLINE Floats value_or_nan(Vec<float> scaled, Floats value) {
  const float nan = encoding::decode<E>(E::kNanCode);
  return select(scaled == scaled, Vec<float>(value), Vec<float>(nan)).native;
}

// Rounds to the nearest number. Ties round to even.
struct ToNearest {
  static constexpr bool kToNearest = true;
  TRANSFORMER_OPS_INLINE void start_row(int64_t) {}

  // Returns the value of the code of x * scale; `i` is the column of the first lane.
  template <class E, Range range>
  TRANSFORMER_OPS_INLINE Floats round(Floats x, Floats scale, int64_t) const {
    using V = Vec<float>;
    if constexpr (E::kInteger) {
      V scaled(x * scale);
      if constexpr (range == Range::Any) scaled = select(scaled == scaled, scaled, V(0.0f));
      if constexpr (range != Range::Fits) {
        scaled = at_least(at_most(scaled, E::kLargest), -E::kLargest);
      }
      return __builtin_convertvector(round_to_int(scaled.native), Floats);
    } else if constexpr (!E::kFloat) {
      const V scaled(x * scale);
      V value(encoding::nf4_number(0));
      for (uint32_t i = 0; i < 15; ++i) {
        value = select(scaled > V(encoding::nf4_tie(i)), V(encoding::nf4_number(i + 1)), value);
      }
      return value.native;
    } else {
      constexpr auto kLeast = static_cast<int32_t>(encoding::kLeastExponent<E>);
      const V scaled((Floats)((Ints)x & 0x7fffffff) * scale);
      V magnitude = scaled;
      if constexpr (range != Range::Fits) magnitude = at_most(scaled, E::kLargest);
      const Ints exponent = larger(
          (Ints)magnitude.native & static_cast<int32_t>(encoding::kInfinity), kLeast + Ints{});
      const auto addend = (Floats)(exponent + static_cast<int32_t>(encoding::kToLastBit<E>));
      Floats value = magnitude.native + addend - addend;
      if constexpr (range == Range::Any) value = value_or_nan<E>(scaled, value);
      return copy_sign(V(value), V(x)).native;
    }
  }
};

}  // namespace
}  // namespace transformer_ops::cpu
