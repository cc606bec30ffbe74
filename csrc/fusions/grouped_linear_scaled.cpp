// forward:  x ─► GroupedLinear ─► Scaled* ─► y
//
// This runs group by group: the activation follows the product while its rows are in the cache. It
// saves the product if backward reads it.
#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/experts.h"
#include "wrappers/linear.h"

namespace transformer_ops::fused::grouped_linear_scaled {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& input, const Tensor& splits,
                  const Tensors& weight, const Tensor& scales, const GluArguments& arguments,
                  bool save_hidden) {
  const TensorSpec hidden = grouped_linear_output(check, input, splits, group_weights(weight));
  check_row_scales(check, scales, input);
  return {activated_output(check, "hidden", hidden, scaled_of(check, arguments)),
          save_hidden ? hidden : absent(hidden.dtype)};
}

void forward_cpu(const Checks& check, const Tensor& input, const Tensor& splits,
                 const Tensors& weight, const Tensor& scales, const GluArguments& arguments,
                 bool save_hidden, Tensor& output, Tensor& hidden) {
  const Tensor rows = as_matrix(input);
  const Groups groups(check, splits, rows.size(0));
  scaled_product_cpu(scaled_of(check, arguments), group_weights(weight), groups, GroupedRows(rows),
                     cpu::to_accumulate(scales, input).view({-1, 1}),
                     save_hidden ? as_matrix(hidden) : Tensor(), as_matrix(output));
}

std::tuple<Tensor, Tensor> decomposition(const Checks& check, const Tensor& input,
                                         const Tensor& splits, const Tensors& weight,
                                         const Tensor& scales, const GluArguments& arguments,
                                         bool save_hidden) {
  const Tensor hidden = grouped_linear_decomposed(input, splits, weight);
  return {scaled_decomposed(scaled_of(check, arguments), hidden, scales),
          save_hidden ? hidden : Tensor()};
}

std::optional<std::string> why_not(const Match& match) {
  if (match.analysis.has_parameter(match.places[0], "bias")) return "the product has a bias";
  const auto& dtypes = match.analysis.dtypes();
  if (match.analysis.compute_dtype(match.places[0]) != dtypes[match.first()]) {
    return "the product computes in a dtype other than its input's";
  }
  return std::nullopt;
}

Bindings bind(const Match& match) {
  Bindings bindings = bind_scaled(match, 1);
  bindings["scales"] = Field{1, "scales"};
  bindings["hidden"] = Field{1, "input"};
  return bindings;
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "grouped_linear_scaled",
             .pass = Pass::Forward,
             .benefit = 30,
             .pattern = {{"GroupedLinear"}, scaled_kinds()},
             .why_not = why_not,
             .bind = bind},
    .forward = {.schema = std::string("grouped_linear_scaled(Tensor input, Tensor splits, "
                                      "Tensor[] weight, Tensor scales, ") +
                          kGluArguments + ", bool save_hidden) -> (Tensor output, Tensor hidden)",
                .shape = shape,
                .products = {.list = {{"weight"}}},
                .bodies = {forward_cpu, decomposition, decomposition}},
});

}  // namespace
}  // namespace transformer_ops::fused::grouped_linear_scaled
