// GroupedLinear: rows of group g times weight[g]^T, plus bias[g]. The groups are consecutive, and
// `splits` has their numbers of rows. Remaining rows become zero.
#include "op/op.h"
#include "wrappers/cpu.h"
#include "wrappers/grouped.h"
#include "wrappers/linear.h"
#include "wrappers/product.h"

namespace transformer_ops::ops::grouped_linear {
namespace {

// Raises unless the tensors are stacked, or a list, as the op's attribute says.
void check_layout(const Checks& check, const char* name, const GroupTensors& tensors,
                  bool is_single) {
  TORCH_CHECK(tensors.empty() || tensors.is_stack() == is_single, "[", check.op(), "] ", name,
              is_single ? " must be one stacked tensor" : " must be a tensor for each group",
              " where single_grouped_", name, " is ", is_single ? "true" : "false", ", got ",
              tensors.list().size(), " of shape ", tensors.list()[0].sym_sizes());
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& splits,
                          const Tensors& weight, const Tensors& bias, const Tensor* scales,
                          bool single_weight, bool single_bias) {
  const GroupTensors weights = group_weights(weight), biases = group_biases(bias);
  TensorSpec output = grouped_linear_output(check, input, splits, weights, biases, scales);
  check_layout(check, "weight", weights, single_weight);
  check_layout(check, "bias", biases, single_bias);
  return {output};
}

// rows += scale bias; each row has its own scale.
void add_bias(const Tensor& rows, const Tensor& bias, const Tensor& scales) {
  if (!scales.defined()) {
    rows.add_(bias);
  } else {
    rows.copy_(to_accumulate(rows) + scales.unsqueeze(-1) * to_accumulate(bias));
  }
}

void forward_cpu(const Checks& check, const Tensor& input, const Tensor& splits,
                 const Tensors& weight, const Tensors& bias, const Tensor* scales, bool, bool,
                 Tensor& output) {
  const Tensor x = as_matrix(input), y = as_matrix(output);
  const Groups groups(check, splits, x.size(0));
  grouped_product_cpu(groups, y, x, group_weights(weight), /*transposes=*/true);
  zero_rest_cpu(groups, y);
  const GroupTensors biases = group_biases(bias);
  if (biases.empty()) return;
  const Tensor scale = scales != nullptr ? scales->reshape({-1}) : Tensor();
  for (int64_t group = 0; group < groups.count(); ++group) {
    const int64_t first = groups.begin(group), count = groups.size(group);
    if (count == 0) continue;
    add_bias(y.narrow(0, first, count), biases[group],
             scales != nullptr ? scale.narrow(0, first, count) : scale);
  }
}

Tensor forward_decomposed(const Tensor& input, const Tensor& splits, const Tensors& weight,
                          const Tensors& bias, const Tensor* scales, bool, bool) {
  return grouped_linear_decomposed(input, splits, weight, bias, scales);
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor* input,
                           const Tensor& splits, const Tensors& weight, const Tensors& bias,
                           const Tensor* scales, bool single_weight, bool single_bias,
                           GroupedMask wanted) {
  check.compute_dtype("grad_output", grad_output);
  check.has_rows("grad_output", grad_output);
  check_splits(check, splits, splits.dim() > 0 ? splits.sym_size(0) : 0);
  const auto [wants_input, wants_weight, wants_bias, wants_scales] = wanted;
  const auto require = [&](const char* name, bool is_given, const char* gradient) {
    TORCH_CHECK(is_given, "[", check.op(), "] ", name, " must be given for ", gradient,
                ", got none");
  };
  const auto dtype = grad_output.scalar_type();
  const c10::SymInt groups = splits.sym_size(0), columns = grad_output.sym_size(-1);
  const TensorSpec none = absent(dtype), no_list = list_of({});
  TensorSpecs specs = {none, no_list, no_list, none};
  const GroupTensors weights = group_weights(weight), biases = group_biases(bias);
  if (!weights.empty()) {
    check_group_weights(check, "weight", weights);
    weights.check(check, "weight", groups, {{columns, weights.sym_size(1)}, dtype});
  }
  biases.check(check, "bias", groups, {{columns}, dtype});
  check_layout(check, "weight", weights, single_weight);
  check_layout(check, "bias", biases, single_bias);
  if (scales != nullptr) {
    check.compute_dtype("scales", *scales);
    const auto rows = grad_output.sym_sizes().slice(0, grad_output.dim() - 1);
    check.spec("scales", *scales, {c10::SymDimVector(rows), scales->scalar_type()});
  }
  if (input != nullptr) {
    check.has_rows("input", *input);
    TensorSpec spec = like(grad_output);
    spec.sizes.back() = !weights.empty() ? weights.sym_size(1) : input->sym_size(-1);
    check.spec("input", *input, spec);
  }
  if (wants_input) {
    require("weight", !weights.empty(), "grad_input");
    specs[0] = like(grad_output);
    specs[0].sizes.back() = weights.sym_size(1);
  }
  if (wants_weight) {
    require("input", input != nullptr, "grad_weight");
    specs[1] = group_gradients(groups, {{columns, input->sym_size(-1)}, dtype}, single_weight);
  }
  if (wants_bias) specs[2] = group_gradients(groups, {{columns}, dtype}, single_bias);
  if (wants_scales) {
    require("bias", !biases.empty(), "grad_scales");
    require("scales", scales != nullptr, "grad_scales");
    specs[3] = like(*scales);
  }
  return specs;
}

// Sums over the rows of each group, in the accumulate dtype.
void bias_gradient(const Groups& groups, const Tensor& grad, const Tensor& scale,
                   const GroupTensors& grad_bias) {
  for (int64_t group = 0; group < groups.count(); ++group) {
    const int64_t first = groups.begin(group), count = groups.size(group);
    Tensor rows = grad.narrow(0, first, count);
    if (scale.defined()) {
      rows = to_accumulate(rows) * scale.narrow(0, first, count).unsqueeze(-1);
    }
    grad_bias[group].copy_(rows.sum(0, false, accumulate_dtype(rows.scalar_type())));
  }
}

void scales_gradient(const Groups& groups, const Tensor& grad, const GroupTensors& bias,
                     const Tensor& grad_scales) {
  grad_scales.zero_();
  for (int64_t group = 0; group < groups.count(); ++group) {
    const int64_t first = groups.begin(group), count = groups.size(group);
    if (count == 0) continue;
    const Tensor rows = to_accumulate(grad.narrow(0, first, count));
    grad_scales.narrow(0, first, count).copy_(rows.mv(to_accumulate(bias[group])));
  }
}

void backward_cpu(const Call& call, const Tensor& grad_output, const Tensor* input,
                  const Tensor& splits, const Tensors& weight, const Tensors& bias,
                  const Tensor* scales, bool, bool, GroupedMask wanted, Tensor& grad_input,
                  Tensors& grad_weight, Tensors& grad_bias, Tensor& grad_scales) {
  const auto [wants_input, wants_weight, wants_bias, wants_scales] = wanted;
  const Tensor grad = as_matrix(grad_output);
  const Groups groups(call, splits, grad.size(0));
  if (wants_weight) {
    grouped_weight_gradient_cpu(groups, group_weights(grad_weight), grad, as_matrix(*input),
                                call.main_grad().adds);
  }
  if (wants_bias) {
    const Tensor scale = scales != nullptr ? scales->reshape({-1}) : Tensor();
    bias_gradient(groups, grad, scale, group_biases(grad_bias));
  }
  if (wants_scales) {
    scales_gradient(groups, grad, group_biases(bias), grad_scales.view({-1}));
  }
  if (wants_input) {
    const Tensor grad_x = as_matrix(grad_input);
    grouped_product_cpu(groups, grad_x, grad, group_weights(weight), /*transposes=*/false);
    zero_rest_cpu(groups, grad_x);
  }
}

GroupedBackward backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                    const Tensor& splits, const Tensors& weight,
                                    const Tensors& bias, const Tensor* scales, bool single_weight,
                                    bool single_bias, GroupedMask wanted) {
  return grouped_linear_backward_decomposed(grad_output, input, splits, weight, bias, scales,
                                            {single_weight, single_bias}, wanted);
}

void backward_cuda(const Call& call, const Tensor& grad_output, const Tensor* input,
                   const Tensor& splits, const Tensors& weight, const Tensors& bias,
                   const Tensor* scales, bool single_weight, bool single_bias, GroupedMask wanted,
                   Tensor& grad_input, Tensors& grad_weight, Tensors& grad_bias,
                   Tensor& grad_scales) {
  const auto [found_input, found_weight, found_bias, found_scales] = backward_decomposed(
      grad_output, input, splits, weight, bias, scales, single_weight, single_bias, wanted);
  if (found_input.defined()) grad_input.copy_(found_input);
  take_gradients(grad_weight, found_weight, call.main_grad().adds);
  take_gradients(grad_bias, found_bias);
  if (found_scales.defined()) grad_scales.copy_(found_scales);
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {
        .kind = "GroupedLinear",
        .summary = "x weight[g]^T + scale bias[g], for the rows of each group g",
        .parameters = {"weight", "bias"},
        .lists = {{"weight", "num_groups", "single_grouped_weight"},
                  {"bias", "num_groups", "single_grouped_bias", /*optional=*/true}},
        .attributes = {"num_groups", "in_features", "out_features", "accumulate_into_main_grad",
                       "delay_wgrad_compute", "single_grouped_weight", "single_grouped_bias"},
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
        // All rows together have only a few numbers.
        .slot_bits =
            [](const std::string& slot, int64_t width, int64_t element_bits) {
              if (slot == "input") return width < 0 ? width : width * element_bits;
              return slot == "splits" ? int64_t{0} : std::max<int64_t>(32, element_bits);
            }},
    .forward = {.schema = "grouped_linear(Tensor input, Tensor splits, Tensor[] weight, "
                          "Tensor[] bias, Tensor? scales, bool single_grouped_weight, "
                          "bool single_grouped_bias) -> Tensor output",
                .shape = forward_shape,
                .products = {.list = {{"weight"}}},
                .bodies = {forward_cpu, forward_decomposed, forward_decomposed}},
    .backward = {.schema = "grouped_linear_backward(Tensor grad_output, Tensor? input, "
                           "Tensor splits, Tensor[] weight, Tensor[] bias, Tensor? scales, "
                           "bool single_grouped_weight, bool single_grouped_bias, "
                           "bool[4] output_mask) -> (Tensor grad_input, Tensor[] grad_weight, "
                           "Tensor[] grad_bias, Tensor grad_scales)",
                 .shape = backward_shape,
                 .products = {.list = {{"weight"}}},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed},
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops::ops::grouped_linear
