// forward:  x ─► BasicLinear ─► Bias ─► GLU ─► y      bias and GLU in one pass over the product
//                                  └─► saved: the GLU's input
#include <ATen/ops/linear.h>

#include "kernels/glu.h"
#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/bias.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/glu.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"

namespace transformer_ops::fused::linear_bias_glu {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& input, const Tensor& weight,
                  const Tensor& bias, const GluArguments& arguments, bool save_kept) {
  const TensorSpec sum = linear_output(check, input, weight, &bias);
  return {glu_output(check, "the product", sum, read_glu(check, arguments)),
          save_kept ? sum : absent(sum.dtype)};
}

// A tensor of half the width, for the GLU's output.
Tensor half_of(const Tensor& product) {
  auto sizes = product.sizes().vec();
  sizes.back() /= 2;
  return empty(sizes, product.scalar_type(), product.device());
}

Tensor kept_of(const Tensor& product, bool save_kept) {
  return save_kept ? product : empty({0}, product.scalar_type(), product.device());
}

std::tuple<Tensor, Tensor> forward_cpu(const Call& call, const Tensor& input, const Tensor& weight,
                                       const Tensor& bias, const GluArguments& arguments,
                                       bool save_kept) {
  const cpu::Glu glu = read_glu(call, arguments);
  const auto [left, factor] = scaled_operand(input, call.scales());
  const Tensor product = linear_cpu(left, weight, /*bias=*/{}, factor), output = half_of(product);
  const Tensor added = cpu::to_accumulate(bias, product);
  const cpu::Rows x{product, product.size(-1)}, y{output, output.size(-1)};
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::bias_glu_forward(glu, cpu::kernel_dtype(product), x.read(begin), added.const_data_ptr(),
                          save_kept ? x.write(begin) : nullptr, y.write(begin), end - begin,
                          y.width);
  });
  return {output, kept_of(product, save_kept)};
}

std::tuple<Tensor, Tensor> forward_cuda(const Call& call, const Tensor& input, const Tensor& weight,
                                        const Tensor& bias, const GluArguments& arguments,
                                        bool save_kept) {
  const Tensor product = linear_cuda(input, weight, /*bias=*/{}, /*scale=*/1.0, call.scales());
  const Tensor output = half_of(product);
  cuda::bias_glu_forward(cuda::stream_of(product), read_glu(call, arguments), kernel_dtype(product),
                         cuda::read(product), cuda::vector(bias),
                         save_kept ? cuda::write(product) : nullptr, cuda::write(output),
                         cuda::rows_of(product), output.size(-1));
  return {output, kept_of(product, save_kept)};
}

Tensor forward_decomposed(const Checks& check, const Tensor& input, const Tensor& weight,
                          const Tensor& bias, const GluArguments& arguments, bool) {
  const Tensor sum = at::linear(input, weight, bias);
  return glu_decomposed(glu_of(check, arguments), sum, read_glu(check, arguments));
}

// ---- the GLU's input, recomputed: it is rounded as in forward, which adds the bias to a product
// that is already rounded

Tensor sum_cpu(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const Tensor product = linear_cpu(input, weight);
  add_bias_cpu(product, bias, product);
  return product;
}

Tensor sum_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const Tensor product = linear_cuda(input, weight);
  add_bias_cuda(product, bias, product);
  return product;
}

Bindings bind(const Match& match) {
  Bindings bindings = bind_glu(match, 2);
  bindings["kept"] = Field{2, "input"};
  return bindings;
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_bias_glu",
             .pass = Pass::Forward,
             // runs before linear_epilogue, which would take the product and its bias
             .benefit = 48,
             .pattern = {{"BasicLinear"}, {"Bias"}, glu_kinds()},
             .why_not = different_linear_dtypes,
             .bind = bind,
             .recomputed = 1},
    .forward = {.schema =
                    std::string("linear_bias_glu(Tensor input, Tensor weight, Tensor bias, ") +
                    kGluArguments + ", bool save_kept) -> (Tensor output, Tensor kept)",
                .shape = shape,
                .any_strides = {"input", "weight"},
                .products = {.list = {{"weight"}}},
                .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                .scalable = true},
    .recompute = recompute_by({.schema = "linear_then_bias(Tensor input, Tensor weight, "
                                         "Tensor bias) -> Tensor output",
                               .shape = linear_bias_shape,
                               .any_strides = {"input", "weight"},
                               .products = {.list = {{"weight"}}},
                               .bodies = {sum_cpu, sum_cuda, linear_bias_decomposed}}),
});

}  // namespace
}  // namespace transformer_ops::fused::linear_bias_glu
