// backward:  g ─► GroupedLinear' ─► Scaled' ─► g      group by group, in temporary memory:
//             └─► grad_weight ◄─ y, recomputed in the pass that computes the gradient of x
#include "op/buffer.h"
#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/grouped.h"
#include "wrappers/linear.h"
#include "wrappers/linear_recomputed.h"
#include "wrappers/product.h"
#include "wrappers/scaled.h"

namespace transformer_ops::fused::scaled_grouped_linear {
namespace {

// The flags of the wanted results among (grad_input, grad_weight, grad_scales).
using Mask = std::array<bool, 3>;

TensorSpecs shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                  const Tensor& scales, const Tensor& splits, const Tensors& weight,
                  const GluArguments& arguments, Mask wanted) {
  const TensorSpec y = scaled_output(check, scaled_of(check, arguments), input, scales);
  const GroupTensors weights = group_weights(weight);
  check_group_columns(check, "weight", weights, y.sizes.back(), y.dtype);
  check_splits(check, splits, weights.sym_count());
  TensorSpec output = y;
  output.sizes.back() = weights.sym_size(0);
  check.spec("grad_output", grad_output, output);
  const auto [wants_input, wants_weight, wants_scales] = wanted;
  return {wants_input ? like(input) : absent(input.scalar_type()),
          wants_weight ? like(weight) : list_of({}),
          wants_scales ? like(scales) : absent(scales.scalar_type())};
}

void backward_cpu(const Call& call, const Tensor& grad_output, const Tensor& input,
                  const Tensor& scales, const Tensor& splits, const Tensors& weight,
                  const GluArguments& arguments, Mask wanted, Tensor& grad_input,
                  Tensors& grad_weight, Tensor& grad_scales) {
  const auto [wants_input, wants_weight, wants_scales] = wanted;
  const bool wants_grad_y = wants_input || wants_scales;
  const ScaledActivation activation = scaled_of(call, arguments);
  const Tensor grad = as_matrix(grad_output), x = as_matrix(input);
  const Tensor grad_x =
      wants_grad_y ? as_matrix(memory_for(grad_input, wants_input, input)) : Tensor();
  const Tensor scale = cpu::to_accumulate(scales, input).view({-1, 1});
  const bool in_place = wants_scales && grad_scales.scalar_type() == scale.scalar_type();
  const Tensor sums =
      in_place ? grad_scales.view({-1, 1}) : empty_cpu(scale.sizes(), scale.scalar_type());
  const Groups groups(call, splits, grad.size(0));
  const GroupTensors weights = group_weights(weight), found = group_weights(grad_weight);
  const int64_t work = weights.size(0) * weights.size(1);
  const auto run_group = [&, wants_weight = wants_weight](int64_t group) {
    const int64_t first = groups.begin(group), count = groups.size(group);
    if (count == 0) {
      if (wants_weight && !call.main_grad().adds) weight_of(found, group).zero_();
      return;
    }
    const int64_t rounded = rounded_rows(count, work, grad.scalar_type());
    const Tensor rows = padded_rows_cpu(grad, first, count, rounded);
    // This holds the gradient of y, then y. Rows of zeros stay zeros.
    const Tensor buffer = empty_cpu({rounded, weights.size(1)}, grad.scalar_type());
    const Tensor own = rows_of(buffer, 0, count), own_x = rows_of(x, first, count);
    const Tensor own_scale = rows_of(scale, first, count);
    if (wants_grad_y) {
      multiply_cpu(buffer, rows, weight_of(weights, group));
      scaled_value_and_backward_cpu(activation, own, own_x, own_scale,
                                    rows_of(grad_x, first, count), rows_of(sums, first, count));
    } else {
      scaled_rows_forward_cpu(activation, own_x, own_scale, own);
      rows_of(buffer, count, rounded - count).zero_();
    }
    if (!wants_weight) return;
    product_cpu(weight_of(found, group), transposed(rows), buffer, call.main_grad().adds);
  };
  parallel_over_groups(groups, 2 * work, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) run_group(group);
  });
  if (wants_input) zero_rest_cpu(groups, grad_x);
  if (!wants_scales) return;
  zero_rest_cpu(groups, sums);
  if (!in_place) grad_scales.copy_(sums.view(grad_scales.sizes()));
}

std::tuple<Tensor, Tensors, Tensor> backward_decomposed(
    const Checks& check, const Tensor& grad_output, const Tensor& input, const Tensor& scales,
    const Tensor& splits, const Tensors& weight, const GluArguments& arguments, Mask wanted) {
  const auto [wants_input, wants_weight, wants_scales] = wanted;
  const bool wants_grad_y = wants_input || wants_scales;
  const ScaledActivation activation = scaled_of(check, arguments);
  const Tensor y = wants_weight ? scaled_decomposed(activation, input, scales) : Tensor();
  const auto [grad_y, grad_weight] = grouped_product_backward_decomposed(
      grad_output, y, splits, weight, {wants_grad_y, wants_weight});
  if (!wants_grad_y) return {Tensor(), grad_weight, Tensor()};
  const auto [grad_input, grad_scales] = gradients(
      [&](const Tensor& x, const Tensor& s) { return scaled_decomposed(activation, x, s); }, grad_y,
      input, scales);
  return {wants_input ? grad_input : Tensor(), grad_weight, wants_scales ? grad_scales : Tensor()};
}

void backward_cuda(const Call& call, const Tensor& grad_output, const Tensor& input,
                   const Tensor& scales, const Tensor& splits, const Tensors& weight,
                   const GluArguments& arguments, Mask wanted, Tensor& grad_input,
                   Tensors& grad_weight, Tensor& grad_scales) {
  const auto [wants_input, wants_weight, wants_scales] = wanted;
  const bool wants_grad_y = wants_input || wants_scales;
  const ScaledActivation activation = scaled_of(call, arguments);
  Tensor y;
  if (wants_weight) {
    c10::DimVector sizes(input.sizes());
    sizes.back() = group_weights(weight).size(1);
    y = empty(sizes, input.scalar_type(), input.device());
    scaled_forward_cuda(activation, input, scales, y);
  }
  const auto [grad_y, grad_w] = grouped_product_backward_decomposed(grad_output, y, splits, weight,
                                                                    {wants_grad_y, wants_weight});
  if (wants_weight) take_gradients(grad_weight, grad_w, call.main_grad().adds);
  if (!wants_grad_y) return;
  scaled_backward_cuda(activation, grad_y, input, scales, wants_input ? grad_input : Tensor(),
                       wants_scales ? grad_scales : Tensor());
}

std::optional<std::string> why_not(const Match& match) {
  if (match.analysis.has_parameter(match.places[1], "bias")) return "the product has a bias";
  return why_not_recomputed(match, 0);
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "scaled_grouped_linear",
             .pass = Pass::Backward,
             .benefit = 30,
             .pattern = {scaled_kinds(), {"GroupedLinear"}},
             .why_not = why_not,
             .bind = [](const Match& match) { return bind_scaled(match, 0); }},
    .backward = {.schema = std::string("scaled_grouped_linear_backward(Tensor grad_output, "
                                       "Tensor input, Tensor scales, Tensor splits, "
                                       "Tensor[] weight, ") +
                           kGluArguments +
                           ", bool[3] output_mask) -> (Tensor grad_input, "
                           "Tensor[] grad_weight, Tensor grad_scales)",
                 .shape = shape,
                 .products = {.list = {{"weight", {"grad_input", "grad_scales"}}}},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed},
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops::fused::scaled_grouped_linear
