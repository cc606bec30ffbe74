#include "wrappers/encoded.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <limits>

#include "kernels/encoding.h"

namespace transformer_ops {

using kernel::Element;
using kernel::Format;
using kernel::ScaleRule;

namespace {

// ---- the numbers of an element type, as lists of all of them. The lists are made on the device,
// because a copy from the host would wait for it.

// The number of codes without a sign that are finite numbers.
template <class E>
constexpr int64_t kNumbers = E::kFirstNan - E::kInfinities;

template <class E>
Tensor decode(const Tensor& code) {
  const Tensor magnitude = code.bitwise_and(E::kSign - 1);
  const Tensor fraction = magnitude.bitwise_and((1 << E::kMantissa) - 1);
  const Tensor exponent = magnitude.bitwise_right_shift(E::kMantissa);
  const Tensor normal = ((exponent + (126 + E::kLeast)).bitwise_left_shift(23) +
                         fraction.bitwise_left_shift(23 - E::kMantissa))
                            .view(at::kFloat);
  const Tensor small = fraction * std::ldexp(1.0, E::kLeast - E::kMantissa);
  Tensor value = at::where(exponent == 0, small, normal);
  value = value.masked_fill(magnitude >= kNumbers<E>, std::numeric_limits<double>::infinity());
  value = value.masked_fill(magnitude >= static_cast<int64_t>(E::kFirstNan),
                            std::numeric_limits<double>::quiet_NaN());
  return at::where(code.bitwise_and(E::kSign) != 0, -value, value).to(at::kFloat);
}

// The values of the codes from 0 on.
Tensor numbers_of(Element element, int64_t count, const Tensor& like) {
  const Tensor code = at::arange(count, like.options().dtype(at::kInt));
  switch (element) {
    case Element::E4M3:
      return decode<encoding::E4M3>(code);
    case Element::E5M2:
      return decode<encoding::E5M2>(code);
    case Element::E2M1:
      return decode<encoding::E2M1>(code.bitwise_and(15));
    case Element::NF4: {
      Tensors numbers;
      for (uint32_t i = 0; i < 16; ++i) {
        numbers.push_back(at::full({}, encoding::nf4_number(i), like.options().dtype(at::kFloat)));
      }
      return at::stack(numbers);
    }
    case Element::Int8:
      return code.to(at::kByte).view(at::kChar).to(at::kFloat);
  }
  return {};
}

// The magnitudes of the codes 0, 1... that are numbers.
Tensor magnitudes(Element element, const Tensor& like) {
  using namespace encoding;
  const int64_t count = element == Element::E2M1   ? kNumbers<E2M1>
                        : element == Element::E4M3 ? kNumbers<E4M3>
                                                   : kNumbers<E5M2>;
  return numbers_of(element, count, like);
}

}  // namespace

Tensor encode_numbers(Element element, const Tensor& scaled) {
  if (element == Element::Int8) {
    return scaled.nan_to_num(0.0, 127.0, -127.0)
        .round()
        .clamp(-127, 127)
        .to(at::kChar)
        .view(at::kByte);
  }
  if (element == Element::NF4) {
    const Tensor numbers = numbers_of(element, 16, scaled);
    const Tensor at_tie = (numbers.slice(0, 1) + numbers.slice(0, 0, -1)) / 2;
    return at::bucketize(scaled, at_tie).masked_fill(scaled.isnan(), 0).to(at::kByte);
  }
  const Tensor numbers = magnitudes(element, scaled), magnitude = scaled.abs();
  const Tensor at_tie = (numbers.slice(0, 1) + numbers.slice(0, 0, -1)) / 2;
  const Tensor lower = at::bucketize(magnitude, at_tie);
  // Ties round to even: to the upper number if the lower one is odd.
  const Tensor upper = at::bucketize(magnitude, at_tie, /*out_int32=*/false, /*right=*/true);
  const Tensor nearest = at::where(lower.bitwise_and(1) == 1, upper, lower);
  const int64_t sign = element == Element::E2M1 ? 8 : 128;
  const Tensor code = at::where(scaled.isnan(), sign - 1, nearest);
  return (code + scaled.signbit() * sign).to(at::kByte);
}

Tensor values_of_codes(Element element, const Tensor& codes) {
  return numbers_of(element, 256, codes).index({codes.to(at::kLong)});
}

Tensor decoded_e8m0(const Tensor& bytes) {
  const Tensor exponent = bytes.to(at::kInt);
  const Tensor bits = at::where(exponent == 0, 0x00400000, exponent.bitwise_left_shift(23));
  return bits.to(at::kInt)
      .view(at::kFloat)
      .masked_fill(bytes == 255, std::numeric_limits<double>::quiet_NaN());
}

namespace {

// Rounds up or down at random, more often to the nearer number. Numbers beyond the largest become
// it.
Tensor encode_stochastic(Element element, const Tensor& scaled) {
  const Tensor list = magnitudes(element, scaled), magnitude = scaled.abs();
  const int64_t last = list.size(0) - 1;
  const Tensor above = at::bucketize(magnitude, list, /*out_int32=*/false, /*right=*/true);
  const Tensor lower = (above - 1).clamp(0, last), upper = above.clamp_max(last);
  const Tensor low = list.index({lower}), gap = list.index({upper}) - low;
  const Tensor goes_up = at::rand_like(magnitude) * gap < magnitude - low;
  const int64_t sign = element == Element::E2M1 ? 8 : 128;
  const Tensor code = at::where(goes_up.logical_and(gap > 0), upper, lower);
  return (at::where(scaled.isnan(), sign - 1, code) + scaled.signbit() * sign).to(at::kByte);
}

// ---- scales

Tensor encoding_scale(const Tensor& amax, double largest) {
  const Tensor scale =
      at::full_like(amax, largest).div(amax).clamp_max(static_cast<double>(encoding::kMost));
  const Tensor usable = (amax > 0).logical_and(amax.isfinite());
  return at::where(usable, scale, at::full_like(amax, 1.0));
}

struct Scales {
  Tensor encode, stored;
};

// The sign is that of the number, also for NaN.
Tensor scaled_by(const Scales& scales, const Tensor& split) {
  return (split.abs() * scales.encode).copysign(split);
}

Scales e8m0_scales(const Tensor& amax, double largest) {
  const Tensor wanted = amax * static_cast<double>(1.0f / static_cast<float>(largest));
  const Tensor bits = wanted.view(at::kInt);
  const Tensor up = (bits + 0x7fffff).bitwise_right_shift(23);
  Tensor byte = at::where(bits <= 0x00400000, 0, up.clamp_max(254));
  byte = at::where(wanted.isinf(), 254, byte);
  byte = at::where(wanted.isnan(), 255, byte);
  const Tensor scale = at::where(byte == 0, 1.0, decoded_e8m0(254 - byte).to(at::kFloat));
  return {at::where(wanted.isnan(), wanted, scale).to(at::kFloat), byte.to(at::kByte)};
}

// The scales of blocks relative to that of the tensor.
Scales e4m3_scales(const Tensor& wanted, const Tensor& tensor_scale) {
  // The magnitude, because a NaN may have a sign.
  const Tensor byte = encode_numbers(Element::E4M3, wanted.abs());
  const Tensor decoded = values_of_codes(Element::E4M3, byte) * tensor_scale.reciprocal();
  return {decoded.reciprocal().clamp_max(static_cast<double>(encoding::kMost)), byte};
}

Scales float_scales(const Format& format, Tensor amax) {
  const bool has_nan = kernel::is_floating(format.element);
  const Tensor nan = amax.isnan();
  if (!has_nan) amax = amax.clamp_max(static_cast<double>(encoding::kMost));
  Tensor scale = encoding_scale(amax, format.largest);
  if (format.rule == ScaleRule::PowerOfTwo) {
    scale = scale.view(at::kInt).bitwise_and(0x7f800000).view(at::kFloat);
  }
  // The inverse of an inverse may differ from amax.
  Tensor stored = format.element == Element::NF4 ? at::where(amax > 0, amax, at::ones_like(amax))
                                                 : scale.reciprocal();
  if (!has_nan) {
    scale = scale.masked_fill(nan, 0.0);
    stored = stored.masked_fill(nan, std::numeric_limits<double>::quiet_NaN());
  }
  return {scale, stored};
}

// ---- 4 over 6

Tensor stretched(const Tensor& amax, const Tensor& tensor_scale, double stretch) {
  // This divides by a tensor, because a GPU multiplies by the inverse of a Python number.
  return amax.div(at::full_like(amax, 6.0)) * tensor_scale * stretch;
}

// Adds the parts one after the other.
Tensor sum_in_order(const Tensor& parts, int64_t dim) {
  Tensor sum = parts.narrow(dim, 0, 1);
  for (int64_t i = 1; i < parts.size(dim); ++i) sum = sum + parts.narrow(dim, i, 1);
  return sum;
}

// The sums of the rounding errors of each block of `split`, each with its scale.
Tensor sums_of_errors(const Format& format, const Tensor& split, const Scales& scales,
                      const Tensor& of_tensor) {
  const Tensor codes = encode_numbers(format.element, scaled_by(scales, split));
  const Tensor number = values_of_codes(Element::E4M3, scales.stored);
  const Tensor product = values_of_codes(format.element, codes) * number * of_tensor;
  const double most = static_cast<double>(format.largest) * format.largest_scale;
  const Tensor error = product.div(at::full_like(product, most)) - split;
  const bool is_squared = format.four_over_six == kernel::FourOverSix::Squared;
  Tensor sums = is_squared ? error * error : error.abs();
  if (format.block_columns == 1) return sum_in_order(sums, 1);
  sums = sum_in_order(sums, 3);
  for (int64_t half = format.block_rows / 2; half > 0; half /= 2) {
    sums = sums.narrow(1, 0, half) + sums.narrow(1, half, half);
  }
  return sums;
}

Scales chosen_scales(const Format& format, const Tensor& split, const Tensor& amax,
                     const Tensor& of_tensor, const Tensor& tensor_scale) {
  const Scales six = e4m3_scales(stretched(amax, tensor_scale, 1.0), tensor_scale);
  const Scales four = e4m3_scales(stretched(amax, tensor_scale, 1.5), tensor_scale);
  const Tensor takes_four = sums_of_errors(format, split, four, of_tensor) <
                            sums_of_errors(format, split, six, of_tensor);
  return {at::where(takes_four, four.encode, six.encode),
          at::where(takes_four, four.stored, six.stored)};
}

}  // namespace

Encoded::Encoded(const Format& format, const Tensor& split, const Tensor& amax,
                 const Tensor& of_tensor, bool stochastic) {
  Scales scales;
  if (format.per_tensor()) {
    scales = float_scales(format, of_tensor);
  } else if (format.rule == ScaleRule::E8M0) {
    scales = e8m0_scales(amax, format.largest);
  } else if (format.rule == ScaleRule::E4M3) {
    tensor_scale = encoding_scale(of_tensor, format.largest_scale * format.largest);
    scales =
        format.chooses_scale()
            ? chosen_scales(format, split, amax, of_tensor, tensor_scale)
            : e4m3_scales(amax * (tensor_scale * static_cast<double>(1.0f / 6.0f)), tensor_scale);
  } else {
    scales = float_scales(format, amax);
  }
  const Tensor scaled = scaled_by(scales, split);
  codes = stochastic ? encode_stochastic(format.element, scaled)
                     : encode_numbers(format.element, scaled);
  stored = scales.stored;
}

}  // namespace transformer_ops
