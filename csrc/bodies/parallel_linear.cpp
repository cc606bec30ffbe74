#include "bodies/parallel_linear.h"

#include "bodies/bias.h"
#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "bodies/product.h"

namespace transformer_ops {

Tensor parallel_input_gradient(const Tensor& grad_output, const Tensor& weight) {
  if (!grad_output.is_cpu()) return linear_input_gradient_cuda(grad_output, weight);
  return std::get<0>(linear_backward_cpu(grad_output, Tensor(), weight));
}

void parallel_weight_gradient(const Call& call, const Tensor& grad_output, const Tensor& input,
                              const Tensor& grad_weight, Tensor grad_bias) {
  const bool adds = call.main_grad().adds;
  if (grad_output.is_cpu()) {
    product_cpu(grad_weight, transposed(as_matrix(grad_output)), as_matrix(input), adds);
    if (grad_bias.defined()) sum_columns_cpu(grad_output, grad_bias);
    return;
  }
  linear_weight_gradient_cuda(grad_output, input, grad_weight,
                              {.adds = adds, .grad_bias = std::move(grad_bias)});
}

std::optional<std::string> why_not_parallel(const Match& match) {
  if (!match.input_requires_grad()) return "the input needs no gradient";
  if (!match.parameter_requires_grad(1, 0)) return "the weight needs no gradient";
  const Analysis& analysis = match.analysis;
  if (analysis.dtypes()[match.places[0]] != analysis.compute_dtype(match.places[1])) {
    return "the input is cast before the product";
  }
  if (!match.has(2)) return std::nullopt;
  if (!match.parameter_requires_grad(2, 0)) return "the bias needs no gradient";
  const bool differ = match.parameters(1)[0].dtype != match.parameters(2)[0].dtype;
  return differ ? std::optional<std::string>("weight and bias have different dtypes")
                : std::nullopt;
}

}  // namespace transformer_ops
