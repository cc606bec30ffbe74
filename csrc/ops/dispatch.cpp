// Dispatch makes a copy of each token for each of its experts, sorted by expert. Combine sums the
// copies of a token. Both move rows by `positions`, without atomics.
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "op/op.h"
#include "wrappers/permute.h"

namespace transformer_ops::ops::dispatch {
namespace {

using Mask = std::array<bool, 2>;  // flags of the wanted results among (grad_input, grad_probs)

void dispatch_cpu(const Checks& check, const Tensor& input, const Tensor& expert_ids,
                  const Tensor& probs, int64_t num_experts, int64_t first_expert,
                  int64_t local_experts, Tensor& output, Tensor& splits, Tensor& permuted_probs,
                  Tensor& positions) {
  const GroupRange groups{first_expert, local_experts};
  sort_by_group_cpu(check, expert_ids, num_experts, groups, splits, positions);
  const Places places(check, positions);
  spread_rows_cpu(input, places, expert_ids.size(-1), output);
  // Each number is a row of its own.
  spread_rows_cpu(probs.reshape({-1, 1}), places, 1, permuted_probs.unsqueeze(-1));
}

TensorSpecs dispatch_backward_shape(const Checks& check, const Tensor& grad_output,
                                    const Tensor* grad_permuted_probs, const Tensor& positions,
                                    Mask wanted) {
  const auto [wants_input, wants_probs] = wanted;
  check_positions(check, positions, positions.sym_sizes().slice(0, positions.dim() - 1));
  const TensorSpec input = gathered_output(check, "grad_output", grad_output, positions);
  TensorSpec probs{c10::SymDimVector(positions.sym_sizes()),
                   accumulate_dtype(grad_output.scalar_type())};
  if (grad_permuted_probs != nullptr) {
    check.compute_dtype("grad_permuted_probs", *grad_permuted_probs);
    probs.dtype = grad_permuted_probs->scalar_type();
    check.spec("grad_permuted_probs", *grad_permuted_probs, {{positions.sym_numel()}, probs.dtype});
  }
  return {wants_input ? input : absent(input.dtype), wants_probs ? probs : absent(probs.dtype)};
}

void dispatch_backward_cpu(const Checks& check, const Tensor& grad_output,
                           const Tensor* grad_permuted_probs, const Tensor& positions, Mask wanted,
                           Tensor& grad_input, Tensor& grad_probs) {
  const auto [wants_input, wants_probs] = wanted;
  if (wants_input) sum_rows_cpu(check, grad_output, positions, grad_input);
  if (!wants_probs) return;
  if (grad_permuted_probs == nullptr) {
    grad_probs.zero_();
  } else {
    take_values_cpu(check, *grad_permuted_probs, positions, grad_probs);
  }
}

std::tuple<Tensor, Tensor> dispatch_backward_decomposed(const Tensor& grad_output,
                                                        const Tensor* grad_permuted_probs,
                                                        const Tensor& positions, Mask wanted) {
  const auto [wants_input, wants_probs] = wanted;
  Tensor grad_probs;
  if (wants_probs) {
    grad_probs = grad_permuted_probs != nullptr
                     ? take_values_decomposed(*grad_permuted_probs, positions)
                     : at::zeros_like(positions, accumulate_dtype(grad_output.scalar_type()));
  }
  return {wants_input ? sum_rows_decomposed(grad_output, positions) : Tensor(), grad_probs};
}

void dispatch_backward_cuda(const Tensor& grad_output, const Tensor* grad_permuted_probs,
                            const Tensor& positions, Mask wanted, Tensor& grad_input,
                            Tensor& grad_probs) {
  const auto [found_input, found_probs] =
      dispatch_backward_decomposed(grad_output, grad_permuted_probs, positions, wanted);
  if (found_input.defined()) grad_input.copy_(found_input);
  if (found_probs.defined()) grad_probs.copy_(found_probs);
}

TensorSpecs recompute_shape(const Checks& check, const Tensor&, const Tensor& input,
                            const Tensor& positions) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  check_positions(check, positions, input.sym_sizes().slice(0, input.dim() - 1));
  return {spread_output(input, positions)};
}

// Uses the saved positions, because the ids were not saved. Readers of the splits have saved them.
Tensor replay_dispatch(const ReplayCall& call) {
  const Tensor positions = call.slot("positions");
  if (!positions.defined()) return {};
  const Tensor probs = call.tensors("probs")[0], kept = call.slot("permuted_probs");
  const int64_t experts = std::get<int64_t>(call.attributes.at("local_experts"));
  call.give("splits", at::zeros({experts}, positions.options().dtype(at::kLong)));
  Tensor permuted =
      spread_rows_decomposed(probs.unsqueeze(-1), positions.unsqueeze(-1)).squeeze(-1);
  // This gives the saved values this history.
  if (kept.defined()) permuted = permuted + (kept - permuted).detach();
  call.give("permuted_probs", permuted);
  call.give("positions", positions);
  return spread_rows_decomposed(call.input, positions);
}

TensorSpecs combine_shape(const Checks& check, const Tensor& input, const Tensor& positions) {
  TORCH_CHECK(positions.scalar_type() == at::kInt, "[", check.op(),
              "] positions must have dtype Int, got ", positions.scalar_type());
  return {gathered_output(check, "input", input, positions)};
}

TensorSpecs combine_backward_shape(const Checks& check, const Tensor& grad_output,
                                   const Tensor& positions) {
  check.compute_dtype("grad_output", grad_output);
  check.has_rows("grad_output", grad_output);
  check_positions(check, positions, grad_output.sym_sizes().slice(0, grad_output.dim() - 1));
  return {spread_output(grad_output, positions)};
}

void recompute_cpu(const Checks& check, const Tensor&, const Tensor& input, const Tensor& positions,
                   Tensor& output) {
  spread_rows_cpu(input, Places(check, positions), positions.size(-1), output);
}

Tensor recompute_decomposed(const Tensor&, const Tensor& input, const Tensor& positions) {
  return spread_rows_decomposed(input, positions);
}

void combine_cpu(const Checks& check, const Tensor& input, const Tensor& positions,
                 Tensor& output) {
  sum_rows_cpu(check, input, positions, output);
}

void combine_backward_cpu(const Checks& check, const Tensor& grad_output, const Tensor& positions,
                          Tensor& grad_input) {
  spread_rows_cpu(grad_output, Places(check, positions), positions.size(-1), grad_input);
}

// The number of positions of a row is known only in a call.
int64_t unknown_bits(const std::string&, int64_t, int64_t) { return -1; }
int64_t bits_of_position(const std::string&, int64_t, int64_t) { return 32; }

[[maybe_unused]] const bool registered_dispatch = register_op({
    .declaration = {.kind = "Dispatch",
                    .summary = "a copy of each row for each of its experts, sorted by expert",
                    .attributes = {"num_experts", "first_expert", "local_experts"},
                    .extra_inputs = {"expert_ids", "probs"},
                    .extra_outputs = {"splits", "permuted_probs", "positions"},
                    .integers = {"expert_ids", "splits", "positions"},
                    .slots = {{"positions"}},
                    .recompute_adds_input = true,
                    .slot_bits = unknown_bits},
    .forward = {.schema = "dispatch(Tensor input, Tensor expert_ids, Tensor probs, "
                          "int num_experts, int first_expert, int local_experts) -> "
                          "(Tensor output, Tensor splits, "
                          "Tensor permuted_probs, Tensor positions)",
                .shape = dispatch_outputs,
                .bodies = {dispatch_cpu, dispatch_decomposed, dispatch_decomposed}},
    .backward = {.schema = "dispatch_backward(Tensor grad_output, Tensor? grad_permuted_probs, "
                           "Tensor positions, bool[2] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_probs)",
                 .shape = dispatch_backward_shape,
                 .bodies = {dispatch_backward_cpu, dispatch_backward_cuda,
                            dispatch_backward_decomposed}},
    .recompute = {.schema = "recompute_dispatch(Tensor grad_output, Tensor input, "
                            "Tensor positions) -> Tensor output",
                  .shape = recompute_shape,
                  .bodies = {recompute_cpu, recompute_decomposed, recompute_decomposed},
                  .reads_first = false},
    .replay = replay_dispatch,
});

[[maybe_unused]] const bool registered_combine = register_op({
    .declaration = {.kind = "Combine",
                    .summary = "the sum of the copies of each row",
                    .extra_inputs = {"positions"},
                    .integers = {"positions"},
                    .slots = {{"positions"}},
                    .slot_bits = bits_of_position},
    .forward = {.schema = "combine(Tensor input, Tensor positions) -> Tensor output",
                .shape = combine_shape,
                .bodies = {combine_cpu, sum_rows_decomposed, sum_rows_decomposed}},
    .backward = {.schema = "combine_backward(Tensor grad_output, Tensor positions) -> "
                           "Tensor grad_input",
                 .shape = combine_backward_shape,
                 .bodies = {combine_backward_cpu, spread_rows_decomposed, spread_rows_decomposed}},
});

}  // namespace
}  // namespace transformer_ops::ops::dispatch
