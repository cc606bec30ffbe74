#include "bodies/parallel_linear.h"

#include <algorithm>

#include "bodies/bias.h"
#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "bodies/product.h"

namespace transformer_ops {

namespace {

const Tensor& with_rows(const Checks& check, const Tensor& input) {
  TORCH_CHECK(input.dim() >= 2, "[", check.op(),
              "] input must have at least 2 dimensions, got shape ", input.sym_sizes());
  return input;
}

std::optional<std::string> why_not(const Match& match) {
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

}  // namespace

c10::SymInt gathered_rows(const Checks& check, const Tensor& input, int64_t ranks) {
  return gathered(check, "input", with_rows(check, input), ranks).sizes[0];
}

c10::SymInt scattered_rows(const Checks& check, const Tensor& input, int64_t ranks) {
  return scattered(check, "input", with_rows(check, input), ranks).sizes[0];
}

std::vector<Chunk> chunks_of(const Tensor& rows) {
  constexpr int64_t kMost = 8, kLeastRows = 128;
  const int64_t whole = rows.size(0), width = std::max<int64_t>(rows.size(-1), 1);
  const int64_t count = std::clamp<int64_t>(rows.numel() / width / kLeastRows, 1,
                                            std::clamp<int64_t>(whole, 1, kMost));
  std::vector<Chunk> chunks;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t first = whole * k / count;
    chunks.push_back({first, whole * (k + 1) / count - first});
  }
  return chunks;
}

void parallel_product(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& output) {
  if (!input.is_cpu()) {
    output.copy_(linear_cuda(input, weight, bias));
  } else if (bias.defined()) {
    output.copy_(bias.expand_as(output));
    add_linear_cpu(output, input, weight);
  } else {
    product_cpu(as_matrix(output), as_matrix(input), transposed(weight), /*adds=*/false);
  }
}

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

std::optional<std::string> different_bias_dtype(const Match& match, int product) {
  // Under autocast both are cast.
  if (!match.has(product + 1) || match.key().autocast) return std::nullopt;
  const bool differ = match.parameters(product)[0].dtype != match.parameters(product + 1)[0].dtype;
  return differ ? std::optional<std::string>("weight and bias have different dtypes")
                : std::nullopt;
}

FusedOp make_rule(ParallelBackward parts) {
  const auto bind = [](const Match& match) {
    return Bindings{{"with_bias", Attribute(match.has(2))}};
  };
  return {
      .rule = {.name = parts.name,
               .pass = Pass::Backward,
               // Before bias_linear, and after the rules that spare a pass over the gradient.
               .benefit = 8,
               .pattern = {{std::move(parts.collective)}, {"BasicLinear"}, optional_op({"Bias"})},
               .why_not = why_not,
               .bind = bind},
      .backward = {.schema = parts.name +
                             "_backward(Tensor grad_output, Tensor input, Tensor weight, "
                             "int group_size, str group, bool with_bias) -> "
                             "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                   .shape = std::move(parts.shape),
                   .bodies = std::move(parts.bodies),
                   .accumulates = true}};
}

}  // namespace transformer_ops
