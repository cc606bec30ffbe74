// forward:  x ─► BasicLinear ─► [Bias] ─► [ConstantScale] ─► [AddExtraInput] ─► y
//                                                                  ▲ residual
//
// This is one product: its sums start from bias and residual, and the scale is its factor.
#include <ATen/ScalarOps.h>
#include <ATen/ops/add.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>

#include <cmath>

#include "kernels/bias.h"
#include "kernels/dropout.h"
#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/add_extra_input.h"
#include "wrappers/cpu.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"

namespace transformer_ops::fused::linear_epilogue {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& input, const Tensor& weight,
                  const Tensor* bias, const Tensor* extra_input, double) {
  const TensorSpec output = linear_output(check, input, weight, bias);
  if (extra_input != nullptr) check_extra_input(check, *extra_input, output);
  return {output};
}

// The numbers from which the product's sums start.
Tensor extra_and_bias(const Tensor& extra, const Tensor& bias) {
  Tensor start = empty_cpu(extra.sizes(), extra.scalar_type());
  if (!bias.defined()) return start.copy_(extra);
  const Tensor from = contiguous(extra), acc = cpu::to_accumulate(bias, extra);
  const cpu::Rows x{from, bias.size(0)}, y{start, x.width};
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::bias_add(cpu::kernel_dtype(from), x.read(begin), acc.const_data_ptr(), y.write(begin),
                  end - begin, x.width);
  });
  return start;
}

void add_bias_and_extra(const Tensor& product, const Tensor& bias, const Tensor& extra) {
  const Tensor from = contiguous(extra), acc = cpu::to_accumulate(bias, product);
  const cpu::Rows y{product, 1}, e{from, 1};
  cpu::parallel(y.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    const auto dtype = cpu::kernel_dtype(product);
    cpu::bias_dropout_add(
        dtype, dtype, y.read(begin), acc.const_data_ptr(), e.read(begin), y.write(begin),
        /*mask=*/nullptr, /*seed=*/0, /*p=*/0.0, begin, end - begin, bias.size(0));
  });
}

// scale sum [+ extra], in the memory of `sum`.
Tensor scale_and_add(Tensor sum, double scale, const Tensor& extra) {
  constexpr double kMostHalf = 65504;  // add_out accepts no larger factor than its dtype holds
  const bool too_large =
      sum.scalar_type() == at::kHalf && std::isfinite(scale) && std::abs(scale) > kMostHalf;
  if (scale != 1 && (!extra.defined() || too_large)) {
    // mul_ would round the factor to the dtype.
    at::mul_out(sum, sum, at::native::wrapped_scalar_tensor(scale));
    scale = 1;
  }
  if (!extra.defined()) return sum;
  return sum.is_cpu() ? at::cpu::add_out(sum, extra, sum, scale)
                      : at::add_out(sum, extra, sum, scale);
}

// A product with factor zero is not computed, so NaN would not pass. If product and bias cancel
// out, a large scale may make each of them overflow.
bool product_scales(double scale, const Tensor& bias) {
  return scale == 1 || (scale != 0 && !bias.defined());
}

Tensor forward_cpu(const Call& call, const Tensor& left, const Tensor& weight,
                   const Tensor* bias_or_none, const Tensor* extra_input, double scale) {
  const Tensor bias = or_undefined(bias_or_none), extra = or_undefined(extra_input);
  const auto [input, factor] = scaled_operand(left, call.scales());
  scale = factor_of(input.scalar_type(), scale);
  if (factor != 1 || !product_scales(scale, bias)) {
    return scale_and_add(linear_cpu(input, weight, bias, factor), scale, extra);
  }
  if (!extra.defined()) return linear_cpu(input, weight, bias, scale);
  if (extra.element_size() > 2) {
    // In float32 a product that starts from the residual takes no longer than one that starts from
    // zero. For 16-bit numbers it takes longer by more than a pass over its result.
    return add_linear_cpu(extra_and_bias(extra, bias), input, weight, scale);
  }
  if (!bias.defined()) return scale_and_add(linear_cpu(input, weight), scale, extra);
  const Tensor product = linear_cpu(input, weight);
  add_bias_and_extra(product, bias, extra);
  return product;
}

Tensor forward_cuda(const Call& call, const Tensor& input, const Tensor& weight,
                    const Tensor* bias_or_none, const Tensor* extra_input, double scale) {
  const Tensor bias = or_undefined(bias_or_none), extra = or_undefined(extra_input);
  scale = factor_of(product_dtype(input), scale);
  if (!product_scales(scale, bias)) {
    const Tensor sum = linear_cuda(input, weight, bias, /*scale=*/1.0, call.scales());
    return scale_and_add(sum, scale, extra);
  }
  return extra.defined() ? linear_add_cuda(input, weight, bias, extra, scale, call.scales())
                         : linear_cuda(input, weight, bias, scale, call.scales());
}

Tensor forward_decomposed(const Tensor& input, const Tensor& weight, const Tensor* bias,
                          const Tensor* extra_input, double scale) {
  Tensor y = at::linear(input, weight, or_undefined(bias));
  if (scale != 1) y = y * scale;
  return extra_input != nullptr ? y + *extra_input : y;
}

std::optional<std::string> why_not(const Match& match) {
  if (match.has(1)) {
    if (auto reason = different_linear_dtypes(match)) return reason;
  }
  return match.has(3) ? different_summands(match, 3) : std::nullopt;
}

Bindings bind(const Match& match) {
  if (match.has(2)) return {};
  return {{"scale", Attribute(1.0)}};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_epilogue",
             .pass = Pass::Forward,
             // runs before add_*_norm, because the residual costs least in the product
             .benefit = 45,
             .pattern = {{"BasicLinear"},
                         optional_op({"Bias"}),
                         optional_op({"ConstantScale"}),
                         optional_op({"AddExtraInput"})},
             .why_not = why_not,
             .bind = bind},
    .forward = {.schema = "linear_epilogue(Tensor input, Tensor weight, Tensor? bias, "
                          "Tensor? extra_input, float scale) -> Tensor output",
                .shape = shape,
                .any_strides = {"input", "weight", "extra_input"},
                .products = {.list = {{"weight"}}},
                .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                .scalable = true},
    .recompute = recompute_by({.schema = "linear_epilogue(Tensor input, Tensor weight, "
                                         "Tensor? bias, Tensor? extra_input, float scale) -> "
                                         "Tensor output",
                               .shape = shape,
                               .any_strides = {"input", "weight", "extra_input"},
                               .products = {.list = {{"weight"}}},
                               .bodies = {forward_cpu, forward_cuda, forward_decomposed}}),
});

}  // namespace
}  // namespace transformer_ops::fused::linear_epilogue
