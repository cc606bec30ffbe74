// joint:  x ─► Dispatch ─► GroupedLinear ─► Scaled* ─► GroupedLinear ─► Combine ─► y
//
// This runs expert by expert, with rows gathered into temporary memory. It saves x, the first
// product and the positions.
#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/experts.h"
#include "wrappers/linear.h"

namespace transformer_ops::fused::moe_mlp {
namespace {

using Mask = std::array<bool, 4>;  // flags of the wanted results among (grad_input, grad_up,
                                   // grad_down, grad_probs)

Tensor column(const Tensor& scales, const Tensor& like) {
  return cpu::to_accumulate(scales, like).view({-1, 1});
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& expert_ids,
                          const Tensor& probs, const Tensors& up, const Tensors& down,
                          int64_t num_experts, int64_t first_expert, int64_t local_experts,
                          const GluArguments& arguments, bool save_hidden) {
  const ScaledActivation activation = scaled_of(check, arguments);
  TensorSpecs specs =
      dispatch_outputs(check, input, expert_ids, probs, num_experts, first_expert, local_experts);
  const Experts experts{activation, up, down};
  check_experts(check, experts, input.sym_size(-1), input.scalar_type());
  TORCH_CHECK(experts.up.sym_count() == local_experts, "[", check.op(), "] up must have ",
              local_experts, " experts, got ", experts.up.sym_count());
  TensorSpec hidden = specs[0], output = like(input);
  hidden.sizes.back() = experts.up.sym_size(0);
  output.sizes.back() = experts.down.sym_size(0);
  specs[0] = output;
  specs.push_back(save_hidden ? hidden : absent(input.scalar_type()));
  return specs;
}

void forward_cpu(const Checks& check, const Tensor& input, const Tensor& expert_ids,
                 const Tensor& probs, const Tensors& up, const Tensors& down, int64_t num_experts,
                 int64_t first_expert, int64_t local_experts, const GluArguments& arguments,
                 bool save_hidden, Tensor& output, Tensor& splits, Tensor& permuted_probs,
                 Tensor& positions, Tensor& hidden) {
  const ScaledActivation activation = scaled_of(check, arguments);
  sort_by_group_cpu(check, expert_ids, num_experts, {first_expert, local_experts}, splits,
                    positions);
  const Places places(check, positions);
  spread_rows_cpu(probs.reshape({-1, 1}), places, 1, permuted_probs.unsqueeze(-1));
  const Groups groups(check, splits, places.count());
  const Experts experts{activation, up, down};
  const Tensor rows = empty_cpu({places.count(), experts.down.size(0)}, input.scalar_type());
  experts_forward_cpu(experts, groups, {as_matrix(input), places, expert_ids.size(-1)},
                      column(permuted_probs, input), save_hidden ? hidden : Tensor(), rows);
  sum_rows_cpu(check, rows, positions, output);
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward forward_decomposed(const Checks& check, const Tensor& input, const Tensor& expert_ids,
                           const Tensor& probs, const Tensors& up, const Tensors& down,
                           int64_t num_experts, int64_t first_expert, int64_t local_experts,
                           const GluArguments& arguments, bool save_hidden) {
  const auto [rows, splits, permuted_probs, positions] =
      dispatch_decomposed(input, expert_ids, probs, num_experts, first_expert, local_experts);
  const Tensor hidden = grouped_linear_decomposed(rows, splits, up);
  const Tensor activated = scaled_decomposed(scaled_of(check, arguments), hidden, permuted_probs);
  const Tensor y = grouped_linear_decomposed(activated, splits, down);
  return {sum_rows_decomposed(y, positions), splits, permuted_probs, positions,
          save_hidden ? hidden : Tensor()};
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                           const Tensor& hidden, const Tensor& permuted_probs, const Tensor& splits,
                           const Tensor& positions, const Tensors& up, const Tensors& down,
                           const GluArguments& arguments, Mask wanted) {
  const ScaledActivation activation = scaled_of(check, arguments);
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  const auto dtype = input.scalar_type();
  check_positions(check, positions, input.sym_sizes().slice(0, input.dim() - 1));
  const Experts experts{activation, up, down};
  check_experts(check, experts, input.sym_size(-1), dtype);
  check_splits(check, splits, experts.up.sym_count());
  TensorSpec output = like(input);
  output.sizes.back() = experts.down.sym_size(0);
  check.spec("grad_output", grad_output, output);
  const c10::SymInt rows = positions.sym_numel();
  check.spec("hidden", hidden, {{rows, experts.up.sym_size(0)}, dtype});
  check.compute_dtype("permuted_probs", permuted_probs);
  check.spec("permuted_probs", permuted_probs, {{rows}, permuted_probs.scalar_type()});
  const TensorSpec probs{c10::SymDimVector(positions.sym_sizes()), permuted_probs.scalar_type()};
  const auto [wants_input, wants_up, wants_down, wants_probs] = wanted;
  return {wants_input ? like(input) : absent(dtype), wants_up ? like(up) : list_of({}),
          wants_down ? like(down) : list_of({}), wants_probs ? probs : absent(probs.dtype)};
}

void backward_cpu(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& hidden, const Tensor& permuted_probs, const Tensor& splits,
                  const Tensor& positions, const Tensors& up, const Tensors& down,
                  const GluArguments& arguments, Mask wanted, Tensor& grad_input, Tensors& grad_up,
                  Tensors& grad_down, Tensor& grad_probs) {
  const ScaledActivation activation = scaled_of(check, arguments);
  const auto [wants_input, wants_up, wants_down, wants_probs] = wanted;
  const auto dtype = input.scalar_type();
  const Places places(check, positions);
  const int64_t copies = positions.size(-1);
  const Groups groups(check, splits, places.count());
  const Tensor scales = column(permuted_probs, input);
  const Experts experts{activation, up, down};
  const Tensors own_up = wants_up ? Tensors() : scratch_like(up);
  const Tensors own_down = wants_down ? Tensors() : scratch_like(down);
  const ExpertGradients gradients{
      .rows = wants_input ? empty_cpu({places.count(), experts.up.size(1)}, dtype) : Tensor(),
      .up = group_weights(wants_up ? grad_up : own_up),
      .down = group_weights(wants_down ? grad_down : own_down),
      .scales = empty_cpu(scales.sizes(), scales.scalar_type())};
  experts_backward_cpu(experts, groups, {as_matrix(grad_output), places, copies},
                       {as_matrix(input), places, copies}, hidden, scales, gradients);
  if (wants_input) sum_rows_cpu(check, gradients.rows, positions, grad_input);
  if (wants_probs) {
    const Tensor sums = gradients.scales.view({-1}).to(grad_probs.scalar_type());
    take_values_cpu(check, sums, positions, grad_probs);
  }
}

using Backward = std::tuple<Tensor, Tensors, Tensors, Tensor>;

Backward backward_decomposed(const Checks& check, const Tensor& grad_output, const Tensor& input,
                             const Tensor& hidden, const Tensor& permuted_probs,
                             const Tensor& splits, const Tensor& positions, const Tensors& up,
                             const Tensors& down, const GluArguments& arguments, Mask wanted) {
  const ScaledActivation activation = scaled_of(check, arguments);
  const auto [wants_input, wants_up, wants_down, wants_probs] = wanted;
  const Tensor activated = scaled_decomposed(activation, hidden, permuted_probs);
  const Tensor rows = spread_rows_decomposed(input, positions);
  const auto [grad_activated, grad_down] = grouped_product_backward_decomposed(
      spread_rows_decomposed(grad_output, positions), activated, splits, down, {true, wants_down});
  const auto [grad_hidden, grad_scales] = gradients(
      [&](const Tensor& x, const Tensor& s) { return scaled_decomposed(activation, x, s); },
      grad_activated, hidden, permuted_probs);
  const auto [grad_rows, grad_up] =
      grouped_product_backward_decomposed(grad_hidden, rows, splits, up, {wants_input, wants_up});
  return {wants_input ? sum_rows_decomposed(grad_rows, positions) : Tensor(), grad_up, grad_down,
          wants_probs ? take_values_decomposed(grad_scales, positions) : Tensor()};
}

void backward_cuda(const Checks& check, const Tensor& grad_output, const Tensor& input,
                   const Tensor& hidden, const Tensor& permuted_probs, const Tensor& splits,
                   const Tensor& positions, const Tensors& up, const Tensors& down,
                   const GluArguments& arguments, Mask wanted, Tensor& grad_input, Tensors& grad_up,
                   Tensors& grad_down, Tensor& grad_probs) {
  const ScaledActivation activation = scaled_of(check, arguments);
  const auto [wants_input, wants_up, wants_down, wants_probs] = wanted;
  const auto make = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    return empty(sizes, dtype, hidden.device());
  };
  const Tensor activated =
      make({hidden.size(0), group_weights(down).size(1)}, hidden.scalar_type());
  scaled_forward_cuda(activation, hidden, permuted_probs, activated);
  const auto [grad_activated, of_down] = grouped_product_backward_decomposed(
      spread_rows_decomposed(grad_output, positions), activated, splits, down, {true, wants_down});
  const Tensor grad_hidden = make(hidden.sizes(), hidden.scalar_type());
  const Tensor of_probs = make(permuted_probs.sizes(), permuted_probs.scalar_type());
  scaled_backward_cuda(activation, grad_activated, hidden, permuted_probs, grad_hidden, of_probs);
  const Tensor rows = spread_rows_decomposed(input, positions);
  const auto [grad_rows, of_up] =
      grouped_product_backward_decomposed(grad_hidden, rows, splits, up, {wants_input, wants_up});
  if (wants_input) grad_input.copy_(sum_rows_decomposed(grad_rows, positions));
  take_gradients(grad_up, of_up);
  take_gradients(grad_down, of_down);
  if (wants_probs) grad_probs.copy_(take_values_decomposed(of_probs, positions));
}

// Does extra input `k` of an op read extra output `output` of the Dispatch?
bool takes(const Match& match, int op, int k, int output) {
  const auto& source = match.op(op).sources[k];
  return source && source->op == match.places[0] && source->output == output;
}

std::optional<std::string> why_not(const Match& match) {
  enum { kDispatch, kUp, kActivation, kDown, kCombine };
  enum { kSplits, kPermutedProbs, kPositions };
  if (match.key().policies.recompute == Recompute::None)
    return "nothing is recomputed (recompute=\"none\")";
  if (auto why = why_not_experts(match, kUp, kActivation, kDown)) return why;
  if (!takes(match, kUp, 0, kSplits) || !takes(match, kDown, 0, kSplits) ||
      !takes(match, kActivation, 0, kPermutedProbs) || !takes(match, kCombine, 0, kPositions)) {
    return "an op does not take its splits, probabilities or positions from the dispatch";
  }
  if (match.op(kDispatch).visible[kPermutedProbs] ||
      match.analysis.readers(match.places[kDispatch], kPermutedProbs).size() > 1) {
    return "another op reads the probabilities";
  }
  return std::nullopt;
}

Bindings bind(const Match& match) {
  Bindings bindings = bind_scaled(match, 2);
  bindings["input"] = Field{0, "input"};
  bindings["hidden"] = Field{2, "input"};
  bindings["up"] = Field{1, "weight"};
  bindings["down"] = Field{3, "weight"};
  return bindings;
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "moe_mlp",
             .pass = Pass::Joint,
             .benefit = 40,
             .pattern =
                 {{"Dispatch"}, {"GroupedLinear"}, scaled_kinds(), {"GroupedLinear"}, {"Combine"}},
             .why_not = why_not,
             .bind = bind},
    .forward = {.schema =
                    std::string("moe_mlp(Tensor input, Tensor expert_ids, Tensor probs, "
                                "Tensor[] up, Tensor[] down, int num_experts, int first_expert, "
                                "int local_experts, ") +
                    kGluArguments +
                    ", bool save_hidden) -> (Tensor output, Tensor splits, "
                    "Tensor permuted_probs, Tensor positions, Tensor hidden)",
                .shape = forward_shape,
                .products = {.list = {{"up"}, {"down"}},
                             .rows = "permuted_probs",
                             .rows_are_numbers = true},
                .bodies = {forward_cpu, forward_decomposed, forward_decomposed}},
    .backward = {.schema = std::string("moe_mlp_backward(Tensor grad_output, Tensor input, "
                                       "Tensor hidden, Tensor permuted_probs, Tensor splits, "
                                       "Tensor positions, Tensor[] up, Tensor[] down, ") +
                           kGluArguments +
                           ", bool[4] output_mask) -> (Tensor grad_input, Tensor[] grad_up, "
                           "Tensor[] grad_down, Tensor grad_probs)",
                 .shape = backward_shape,
                 .products = {.list = {{"up"}, {"down", {"grad_input", "grad_up", "grad_probs"}}},
                              .rows = "hidden"},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed}},
});

}  // namespace
}  // namespace transformer_ops::fused::moe_mlp
