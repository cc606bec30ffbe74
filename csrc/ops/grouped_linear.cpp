// GroupedLinear: rows of group g times weight[g]^T, plus bias[g]. The rows of a group follow one
// another; `splits` says how many each has. What is left over is zero.
#include "bodies/cpu.h"
#include "bodies/grouped.h"
#include "bodies/linear.h"
#include "bodies/product.h"
#include "op/op.h"

namespace transformer_ops::ops::grouped_linear {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& splits,
                          const Tensor& weight, const Tensor* bias, const Tensor* scales) {
  return {grouped_linear_output(check, input, splits, weight, bias, scales)};
}

// rows += scale bias, each row with a scale of its own.
void add_bias(const Tensor& rows, const Tensor& bias, const Tensor& scales) {
  if (!scales.defined()) {
    rows.add_(bias);
  } else {
    rows.copy_(to_accumulate(rows) + scales.unsqueeze(-1) * to_accumulate(bias));
  }
}

void forward_cpu(const Checks& check, const Tensor& input, const Tensor& splits,
                 const Tensor& weight, const Tensor* bias, const Tensor* scales, Tensor& output) {
  const Tensor x = as_matrix(input), y = as_matrix(output);
  const Groups groups(check, splits, x.size(0));
  grouped_product_cpu(groups, y, x, weight.transpose(1, 2));
  zero_rest_cpu(groups, y);
  if (bias == nullptr) return;
  const Tensor scale = scales != nullptr ? scales->reshape({-1}) : Tensor();
  for (int64_t group = 0; group < groups.count(); ++group) {
    const int64_t first = groups.begin(group), count = groups.size(group);
    if (count == 0) continue;
    add_bias(y.narrow(0, first, count), bias->select(0, group),
             scales != nullptr ? scale.narrow(0, first, count) : scale);
  }
}

Tensor forward_cuda(const Tensor& input, const Tensor& splits, const Tensor& weight,
                    const Tensor* bias, const Tensor* scales) {
  return grouped_linear_unfused(input, splits, weight, bias, scales);
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor* input,
                           const Tensor& splits, const Tensor* weight, const Tensor* bias,
                           const Tensor* scales, GroupedMask wanted) {
  check.compute_dtype("grad_output", grad_output);
  check.has_rows("grad_output", grad_output);
  check_splits(check, splits, splits.dim() > 0 ? splits.sym_size(0) : 0);
  const auto [wants_input, wants_weight, wants_bias, wants_scales] = wanted;
  const auto require = [&](const char* name, const Tensor* tensor, const char* gradient) {
    TORCH_CHECK(tensor != nullptr, "[", check.op(), "] ", name, " must be given for ", gradient,
                ", got none");
  };
  const auto dtype = grad_output.scalar_type();
  const c10::SymInt groups = splits.sym_size(0), columns = grad_output.sym_size(-1);
  const TensorSpec none = absent(dtype);
  TensorSpecs specs = {none, none, none, none};
  if (weight != nullptr) {
    TORCH_CHECK(weight->dim() == 3, "[", check.op(), "] weight must have 3 dimensions, got shape ",
                weight->sym_sizes());
    check.spec("weight", *weight, {{groups, columns, weight->sym_size(2)}, dtype});
  }
  if (bias != nullptr) check.spec("bias", *bias, {{groups, columns}, dtype});
  if (scales != nullptr) {
    check.compute_dtype("scales", *scales);
    const auto rows = grad_output.sym_sizes().slice(0, grad_output.dim() - 1);
    check.spec("scales", *scales, {c10::SymDimVector(rows), scales->scalar_type()});
  }
  if (input != nullptr) {
    check.has_rows("input", *input);
    TensorSpec spec = like(grad_output);
    spec.sizes.back() = weight != nullptr ? weight->sym_size(2) : input->sym_size(-1);
    check.spec("input", *input, spec);
  }
  if (wants_input) {
    require("weight", weight, "grad_input");
    specs[0] = like(grad_output);
    specs[0].sizes.back() = weight->sym_size(2);
  }
  if (wants_weight) {
    require("input", input, "grad_weight");
    specs[1] = {{groups, columns, input->sym_size(-1)}, dtype};
  }
  if (wants_bias) specs[2] = {{groups, columns}, dtype};
  if (wants_scales) {
    require("bias", bias, "grad_scales");
    require("scales", scales, "grad_scales");
    specs[3] = like(*scales);
  }
  return specs;
}

// Sums over the rows of each group, in the accumulate dtype.
void bias_gradient(const Groups& groups, const Tensor& grad, const Tensor& scale,
                   const Tensor& grad_bias) {
  for (int64_t group = 0; group < groups.count(); ++group) {
    const int64_t first = groups.begin(group), count = groups.size(group);
    Tensor rows = grad.narrow(0, first, count);
    if (scale.defined()) {
      rows = to_accumulate(rows) * scale.narrow(0, first, count).unsqueeze(-1);
    }
    grad_bias.select(0, group).copy_(rows.sum(0, false, accumulate_dtype(rows.scalar_type())));
  }
}

void scales_gradient(const Groups& groups, const Tensor& grad, const Tensor& bias,
                     const Tensor& grad_scales) {
  grad_scales.zero_();
  for (int64_t group = 0; group < groups.count(); ++group) {
    const int64_t first = groups.begin(group), count = groups.size(group);
    if (count == 0) continue;
    const Tensor rows = to_accumulate(grad.narrow(0, first, count));
    grad_scales.narrow(0, first, count).copy_(rows.mv(to_accumulate(bias.select(0, group))));
  }
}

void backward_cpu(const Call& call, const Tensor& grad_output, const Tensor* input,
                  const Tensor& splits, const Tensor* weight, const Tensor* bias,
                  const Tensor* scales, GroupedMask wanted, Tensor& grad_input, Tensor& grad_weight,
                  Tensor& grad_bias, Tensor& grad_scales) {
  const auto [wants_input, wants_weight, wants_bias, wants_scales] = wanted;
  const Tensor grad = as_matrix(grad_output);
  const Groups groups(call, splits, grad.size(0));
  if (wants_weight) {
    grouped_weight_gradient_cpu(groups, grad_weight, grad, as_matrix(*input),
                                call.main_grad().adds);
  }
  if (wants_bias) {
    const Tensor scale = scales != nullptr ? scales->reshape({-1}) : Tensor();
    bias_gradient(groups, grad, scale, grad_bias);
  }
  if (wants_scales) scales_gradient(groups, grad, *bias, grad_scales.view({-1}));
  if (wants_input) {
    const Tensor grad_x = as_matrix(grad_input);
    grouped_product_cpu(groups, grad_x, grad, *weight);
    zero_rest_cpu(groups, grad_x);
  }
}

GroupedBackward backward_unfused(const Tensor& grad_output, const Tensor* input,
                                 const Tensor& splits, const Tensor* weight, const Tensor* bias,
                                 const Tensor* scales, GroupedMask wanted) {
  return grouped_linear_backward_unfused(grad_output, input, splits, weight, bias, scales, wanted);
}

void backward_cuda(const Call& call, const Tensor& grad_output, const Tensor* input,
                   const Tensor& splits, const Tensor* weight, const Tensor* bias,
                   const Tensor* scales, GroupedMask wanted, Tensor& grad_input,
                   Tensor& grad_weight, Tensor& grad_bias, Tensor& grad_scales) {
  const auto [found_input, found_weight, found_bias, found_scales] =
      backward_unfused(grad_output, input, splits, weight, bias, scales, wanted);
  if (found_input.defined()) grad_input.copy_(found_input);
  if (found_weight.defined()) {
    call.main_grad().adds ? grad_weight.add_(found_weight) : grad_weight.copy_(found_weight);
  }
  if (found_bias.defined()) grad_bias.copy_(found_bias);
  if (found_scales.defined()) grad_scales.copy_(found_scales);
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {
        .kind = "GroupedLinear",
        .summary = "x weight[g]^T + scale bias[g], for the rows of each group g",
        .parameters = {"weight", "bias"},
        .attributes = {"num_groups", "in_features", "out_features", "accumulate_into_main_grad",
                       "delay_wgrad_compute"},
        .extra_inputs = {"splits", "scales"},
        .integers = {"splits"},
        .slots = {{"input", {"weight"}},
                  {"splits"},
                  {"weight", {"input"}},
                  {"bias", {"scales"}},
                  {"scales", {"bias", "scales"}}},
        .states = {{"delayed_wgrad", "weight", "delay_wgrad_compute", /*later=*/true},
                   {"main_grad", "weight", "accumulate_into_main_grad"}},
        .dtype = DTypeRule::Parameter,
        .operands = {"input", "weight"},
        .width = [](const Attributes& attributes,
                    int64_t) { return std::get<int64_t>(attributes.at("out_features")); },
        // A few numbers for all rows.
        .slot_bits =
            [](const std::string& slot, int64_t width, int64_t element_bits) {
              if (slot == "input") return width < 0 ? width : width * element_bits;
              return slot == "splits" ? int64_t{0} : std::max<int64_t>(32, element_bits);
            }},
    .forward = {.schema = "grouped_linear(Tensor input, Tensor splits, Tensor weight, "
                          "Tensor? bias, Tensor? scales) -> Tensor output",
                .shape = forward_shape,
                .bodies = {forward_cpu, forward_cuda, grouped_linear_unfused}},
    .backward = {.schema = "grouped_linear_backward(Tensor grad_output, Tensor? input, "
                           "Tensor splits, Tensor? weight, Tensor? bias, Tensor? scales, "
                           "bool[4] output_mask) -> (Tensor grad_input, Tensor grad_weight, "
                           "Tensor grad_bias, Tensor grad_scales)",
                 .shape = backward_shape,
                 .bodies = {backward_cpu, backward_cuda, backward_unfused},
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops::ops::grouped_linear
