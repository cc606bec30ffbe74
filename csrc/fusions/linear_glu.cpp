// backward:  g ─► BasicLinear' ─► GLU' ─► g
//             └─► grad_weight ◄─ y, recomputed in the same pass
#include "kernels/glu.h"
#include "op/buffer.h"
#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/glu.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"
#include "wrappers/linear_recomputed.h"

namespace transformer_ops::fused::linear_glu {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, const GluArguments& arguments, LinearMask wanted) {
  check.compute_dtype("input", input);
  const TensorSpec y = glu_output(check, "input", like(input), read_glu(check, arguments));
  TensorSpecs specs = linear_backward_outputs(check, grad_output, input, weight, y);
  for (size_t k = 0; k < specs.size(); ++k) {
    if (!wanted[k]) specs[k] = absent(input.scalar_type());
  }
  return specs;
}

void backward_cpu(const Call& call, const Tensor& grad_output, const Tensor& input,
                  const Tensor& weight, const GluArguments& arguments, LinearMask wanted,
                  Tensor& grad_input, Tensor& grad_weight) {
  const cpu::Glu glu = read_glu(call, arguments);
  const auto [wants_input, wants_weight] = wanted;
  const Tensor of_input = memory_for(grad_input, wants_input, input);
  const int64_t width = input.size(-1);
  const int64_t block = std::max<int64_t>(1, glu.interleave);
  const int64_t unit = (64 + block - 1) / block * block;
  const auto pass = [&](const Tensor& buffer, int64_t first) {
    const cpu::Rows both{buffer, buffer.size(1)}, x{input, width}, grad_x{of_input, width};
    cpu::parallel(both.count(), both.width, 1, [&](int64_t begin, int64_t end) {
      cpu::glu_value_and_backward(glu, cpu::kernel_dtype(input), both.write(begin), x.read(begin),
                                  grad_x.write(begin), end - begin, both.width, width / 2, first);
    });
  };
  linear_recomputed_cpu(call, grad_output, weight, {wants_input, wants_weight}, grad_weight, width,
                        unit, pass);
}

void backward_cuda(const Call& call, const Tensor& grad_output, const Tensor& input,
                   const Tensor& weight, const GluArguments& arguments, LinearMask wanted,
                   Tensor& grad_input, Tensor& grad_weight) {
  const cuda::Glu glu = read_glu(call, arguments);
  const auto [wants_input, wants_weight] = wanted;
  c10::DimVector sizes(input.sizes());
  sizes.back() /= 2;
  if (wants_weight) {
    // y is freed before its gradient is allocated.
    const Tensor y = empty(sizes, input.scalar_type(), input.device());
    glu_forward_cuda(glu, input, y);
    linear_weight_gradient_cuda(grad_output, y, grad_weight, {.adds = call.main_grad().adds});
  }
  if (!wants_input) return;
  const Tensor grad_y = linear_input_gradient_cuda(grad_output, weight);
  glu_backward_cuda(glu, grad_y, input, grad_input);
}

std::tuple<Tensor, Tensor> backward_decomposed(const Checks& check, const Tensor& grad_output,
                                               const Tensor& input, const Tensor& weight,
                                               const GluArguments& arguments, LinearMask wanted) {
  const auto [wants_input, wants_weight] = wanted;
  const auto function = [&](const Tensor& x) {
    return glu_decomposed(glu_of(check, arguments), x, read_glu(check, arguments));
  };
  const auto [grad_input, grad_weight] = linear_recomputed_decomposed(
      grad_output, input, weight, {wants_input, wants_weight}, function);
  return {wants_input ? grad_input : Tensor(), grad_weight};
}

Bindings bind(const Match& match) {
  Bindings bindings = bind_glu(match, 0);
  bindings["input"] = Field{0, "input"};
  return bindings;
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_glu",
             .pass = Pass::Backward,
             .benefit = 30,
             .pattern = {glu_kinds(), {"BasicLinear"}},
             .why_not = [](const Match& match) { return why_not_recomputed(match, 0); },
             .bind = bind},
    .backward = {.schema = std::string("linear_glu_backward(Tensor grad_output, Tensor input, "
                                       "Tensor weight, ") +
                           kGluArguments +
                           ", bool[2] output_mask) -> (Tensor grad_input, Tensor grad_weight)",
                 .shape = shape,
                 .overwrites = {"input"},
                 .products = {.list = {{"weight"}}},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed},
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops::fused::linear_glu
