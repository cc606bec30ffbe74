#include "ops/linear_add.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/mul.h>

#include <cmath>

#include "ops/cpu.h"
#include "ops/linear.h"

namespace transformer_ops {
namespace {

// What the product's sums start from.
Tensor extra_and_bias(const Tensor& extra, const Tensor& bias) {
  Tensor start = empty_cpu(extra.sizes(), extra.scalar_type());
  if (!bias.defined()) return start.copy_(extra);
  const Tensor from = contiguous(extra), acc = cpu::to_accumulate(bias, extra);
  const cpu::Rows x{from, bias.size(0)}, y{start, x.width};
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::kernels().bias_add(cpu::kernel_dtype(from), x.read(begin), acc.const_data_ptr(),
                            y.write(begin), end - begin, x.width);
  });
  return start;
}

void add_bias_and_extra(const Tensor& product, const Tensor& bias, const Tensor& extra) {
  const Tensor from = contiguous(extra), acc = cpu::to_accumulate(bias, product);
  const cpu::Rows y{product, 1}, e{from, 1};
  cpu::parallel(y.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    const auto dtype = cpu::kernel_dtype(product);
    cpu::kernels().bias_dropout_add(
        dtype, dtype, y.read(begin), acc.const_data_ptr(), e.read(begin), y.write(begin),
        /*mask=*/nullptr, /*seed=*/0, /*p=*/0.0, begin, end - begin, bias.size(0));
  });
}

}  // namespace

Tensor linear_add_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& extra, double scale) {
  // In float32 a product that starts from the residual takes no longer than one that starts from
  // zero; of 16-bit numbers it takes longer by more than a pass over its result. A product that is
  // scaled by zero is not computed, and NaN would not pass.
  if (extra.element_size() > 2 && scale != 0) {
    return add_linear_cpu(extra_and_bias(extra, bias), input, weight, scale);
  }
  constexpr double kMostHalf = 65504;  // add_out takes no factor that its dtype does not hold
  Tensor product = linear_cpu(input, weight);
  if (bias.defined()) {
    add_bias_and_extra(product, bias, extra);
  } else if (extra.scalar_type() == at::kHalf && std::isfinite(scale) &&
             std::abs(scale) > kMostHalf) {
    // mul_ would round the factor to the dtype.
    at::mul_out(product, product, at::native::wrapped_scalar_tensor(scale));
    at::cpu::add_out(product, extra, product);
  } else {
    at::cpu::add_out(product, extra, product, scale);
  }
  return product;
}

}  // namespace transformer_ops
