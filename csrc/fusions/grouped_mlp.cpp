// joint:  x ─► GroupedLinear ─► Scaled* ─► GroupedLinear ─► y
//
// This runs group by group, in temporary memory. It saves x, the first product and the row scales.
#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/experts.h"
#include "wrappers/linear.h"

namespace transformer_ops::fused::grouped_mlp {
namespace {

using Mask = std::array<bool, 4>;  // flags of the wanted results among (grad_input, grad_up,
                                   // grad_down, grad_scales)

// The splits of the two products may differ, which shows only in their numbers.
struct SplitsOf {
  const Tensor& up;
  const Tensor& down;
};

TensorSpec check_hidden(const Checks& check, const Tensor& input, const SplitsOf& splits,
                        const Tensor& scales, const Experts& experts) {
  TensorSpec hidden = grouped_linear_output(check, input, splits.up, experts.up);
  check_splits(check, splits.down, experts.up.sym_count());
  check_experts(check, experts, input.sym_size(-1), input.scalar_type());
  check_row_scales(check, scales, input);
  return hidden;
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& splits,
                          const Tensor& scales, const Tensor& down_splits, const Tensors& up,
                          const Tensors& down, const GluArguments& arguments, bool save_hidden) {
  const ScaledActivation activation = scaled_of(check, arguments);
  const Experts experts{activation, up, down};
  const TensorSpec hidden = check_hidden(check, input, {splits, down_splits}, scales, experts);
  TensorSpec output = like(input);
  output.sizes.back() = experts.down.sym_size(0);
  return {output, save_hidden ? hidden : absent(input.scalar_type())};
}

using Forward = std::tuple<Tensor, Tensor>;

Forward forward_decomposed(const Checks& check, const Tensor& input, const Tensor& splits,
                           const Tensor& scales, const Tensor& down_splits, const Tensors& up,
                           const Tensors& down, const GluArguments& arguments, bool save_hidden) {
  const Tensor hidden = grouped_linear_decomposed(input, splits, up);
  const Tensor activated = scaled_decomposed(scaled_of(check, arguments), hidden, scales);
  return {grouped_linear_decomposed(activated, down_splits, down), save_hidden ? hidden : Tensor()};
}

void forward_cpu(const Checks& check, const Tensor& input, const Tensor& splits,
                 const Tensor& scales, const Tensor& down_splits, const Tensors& up,
                 const Tensors& down, const GluArguments& arguments, bool save_hidden,
                 Tensor& output, Tensor& hidden) {
  const ScaledActivation activation = scaled_of(check, arguments);
  const Tensor rows = as_matrix(input);
  const Groups groups(check, splits, rows.size(0)), others(check, down_splits, rows.size(0));
  if (groups != others) {
    const auto [y, wide] = forward_decomposed(check, input, splits, scales, down_splits, up, down,
                                              arguments, save_hidden);
    output.copy_(y);
    if (save_hidden) hidden.copy_(wide);
    return;
  }
  experts_forward_cpu({activation, up, down}, groups, GroupedRows(rows),
                      cpu::to_accumulate(scales, input).view({-1, 1}),
                      save_hidden ? as_matrix(hidden) : Tensor(), as_matrix(output));
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                           const Tensor& hidden, const Tensor& scales, const Tensor& splits,
                           const Tensor& down_splits, const Tensors& up, const Tensors& down,
                           const GluArguments& arguments, Mask wanted) {
  const ScaledActivation activation = scaled_of(check, arguments);
  const Experts experts{activation, up, down};
  check.spec("hidden", hidden, check_hidden(check, input, {splits, down_splits}, scales, experts));
  TensorSpec output = like(input);
  output.sizes.back() = experts.down.sym_size(0);
  check.spec("grad_output", grad_output, output);
  const auto dtype = input.scalar_type();
  const auto [wants_input, wants_up, wants_down, wants_scales] = wanted;
  return {wants_input ? like(input) : absent(dtype), wants_up ? like(up) : list_of({}),
          wants_down ? like(down) : list_of({}),
          wants_scales ? like(scales) : absent(scales.scalar_type())};
}

using Backward = std::tuple<Tensor, Tensors, Tensors, Tensor>;

Backward backward_decomposed(const Checks& check, const Tensor& grad_output, const Tensor& input,
                             const Tensor& hidden, const Tensor& scales, const Tensor& splits,
                             const Tensor& down_splits, const Tensors& up, const Tensors& down,
                             const GluArguments& arguments, Mask wanted) {
  const ScaledActivation activation = scaled_of(check, arguments);
  const auto [wants_input, wants_up, wants_down, wants_scales] = wanted;
  const Tensor activated = scaled_decomposed(activation, hidden, scales);
  const auto [grad_activated, grad_down] = grouped_product_backward_decomposed(
      grad_output, activated, down_splits, down, {true, wants_down});
  const auto [grad_hidden, grad_scales] = gradients(
      [&](const Tensor& x, const Tensor& s) { return scaled_decomposed(activation, x, s); },
      grad_activated, hidden, scales);
  const auto [grad_input, grad_up] =
      grouped_product_backward_decomposed(grad_hidden, input, splits, up, {wants_input, wants_up});
  return {grad_input, grad_up, grad_down, wants_scales ? grad_scales : Tensor()};
}

// The same with a separate kernel for the activation, into the results of a kernel wrapper.
void backward_apart(const ScaledActivation& activation,
                    decltype(&scaled_backward_cpu) scaled_backward, const Tensor& grad_output,
                    const Tensor& input, const Tensor& hidden, const Tensor& scales,
                    const SplitsOf& splits, const Tensors& up, const Tensors& down, Mask wanted,
                    Tensor& grad_input, Tensors& grad_up, Tensors& grad_down, Tensor& grad_scales) {
  const auto [wants_input, wants_up, wants_down, wants_scales] = wanted;
  const Tensor activated = scaled_decomposed(activation, hidden, scales);
  const auto [grad_activated, of_down] = grouped_product_backward_decomposed(
      grad_output, activated, splits.down, down, {true, wants_down});
  const Tensor grad_hidden = empty(hidden.sizes(), hidden.scalar_type(), hidden.device());
  const Tensor of_scales =
      wants_scales ? grad_scales : empty(scales.sizes(), scales.scalar_type(), scales.device());
  scaled_backward(activation, grad_activated, hidden, scales, grad_hidden, of_scales);
  const auto [of_input, of_up] = grouped_product_backward_decomposed(grad_hidden, input, splits.up,
                                                                     up, {wants_input, wants_up});
  if (wants_input) grad_input.copy_(of_input);
  take_gradients(grad_up, of_up);
  take_gradients(grad_down, of_down);
}

void backward_cpu(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& hidden, const Tensor& scales, const Tensor& splits,
                  const Tensor& down_splits, const Tensors& up, const Tensors& down,
                  const GluArguments& arguments, Mask wanted, Tensor& grad_input, Tensors& grad_up,
                  Tensors& grad_down, Tensor& grad_scales) {
  const ScaledActivation activation = scaled_of(check, arguments);
  const auto [wants_input, wants_up, wants_down, wants_scales] = wanted;
  const Tensor rows = as_matrix(input);
  const Groups groups(check, splits, rows.size(0)), others(check, down_splits, rows.size(0));
  if (groups != others) {
    return backward_apart(activation, scaled_backward_cpu, grad_output, input, hidden, scales,
                          {splits, down_splits}, up, down, wanted, grad_input, grad_up, grad_down,
                          grad_scales);
  }
  const Tensors own_up = wants_up ? Tensors() : scratch_like(up);
  const Tensors own_down = wants_down ? Tensors() : scratch_like(down);
  const Tensor column = cpu::to_accumulate(scales, input).view({-1, 1});
  const ExpertGradients found{.rows = wants_input ? as_matrix(grad_input) : Tensor(),
                              .up = group_weights(wants_up ? grad_up : own_up),
                              .down = group_weights(wants_down ? grad_down : own_down),
                              .scales = empty_cpu(column.sizes(), column.scalar_type())};
  experts_backward_cpu({activation, up, down}, groups, GroupedRows(as_matrix(grad_output)),
                       GroupedRows(rows), as_matrix(hidden), column, found);
  if (wants_scales) grad_scales.copy_(found.scales.view(grad_scales.sizes()));
}

void backward_cuda(const Checks& check, const Tensor& grad_output, const Tensor& input,
                   const Tensor& hidden, const Tensor& scales, const Tensor& splits,
                   const Tensor& down_splits, const Tensors& up, const Tensors& down,
                   const GluArguments& arguments, Mask wanted, Tensor& grad_input, Tensors& grad_up,
                   Tensors& grad_down, Tensor& grad_scales) {
  backward_apart(scaled_of(check, arguments), scaled_backward_cuda, grad_output, input, hidden,
                 scales, {splits, down_splits}, up, down, wanted, grad_input, grad_up, grad_down,
                 grad_scales);
}

std::optional<std::string> why_not(const Match& match) { return why_not_experts(match, 0, 1, 2); }

Bindings bind(const Match& match) {
  Bindings bindings = bind_scaled(match, 1);
  bindings["input"] = Field{0, "input"};
  bindings["splits"] = Field{0, "splits"};
  bindings["down_splits"] = Field{2, "splits"};
  bindings["hidden"] = Field{1, "input"};
  bindings["scales"] = Field{1, "scales"};
  bindings["up"] = Field{0, "weight"};
  bindings["down"] = Field{2, "weight"};
  return bindings;
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "grouped_mlp",
             .pass = Pass::Joint,
             .benefit = 35,
             .pattern = {{"GroupedLinear"}, scaled_kinds(), {"GroupedLinear"}},
             .why_not = why_not,
             .bind = bind},
    .forward = {.schema = std::string("grouped_mlp(Tensor input, Tensor splits, Tensor scales, "
                                      "Tensor down_splits, Tensor[] up, Tensor[] down, ") +
                          kGluArguments + ", bool save_hidden) -> (Tensor output, Tensor hidden)",
                .shape = forward_shape,
                .products = {.list = {{"up"}, {"down"}}},
                .bodies = {forward_cpu, forward_decomposed, forward_decomposed}},
    .backward = {.schema = std::string("grouped_mlp_backward(Tensor grad_output, Tensor input, "
                                       "Tensor hidden, Tensor scales, Tensor splits, "
                                       "Tensor down_splits, Tensor[] up, Tensor[] down, ") +
                           kGluArguments +
                           ", bool[4] output_mask) -> (Tensor grad_input, Tensor[] grad_up, "
                           "Tensor[] grad_down, Tensor grad_scales)",
                 .shape = backward_shape,
                 .products = {.list = {{"up"}, {"down", {"grad_input", "grad_up", "grad_scales"}}}},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed}},
});

}  // namespace
}  // namespace transformer_ops::fused::grouped_mlp
