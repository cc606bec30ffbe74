// Activations whose rows are scaled: y = scales[row] act(x), as in a mixture of experts, whose
// outputs are weighted by the router's probabilities.
#include <algorithm>

#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/scaled.h"

namespace transformer_ops::ops::scaled_activation {
namespace {

using Mask = std::array<bool, 2>;  // flags of the wanted results among (grad_input, grad_scales)

template <typename... Numbers>
ScaledActivation with(const ScaledRow& row, Numbers... numbers) {
  if constexpr (sizeof...(Numbers) == 0) {
    return {row};
  } else {
    return {row, glu_with(*row.glu, numbers...)};
  }
}

std::string attributes_of(const ScaledRow& row) {
  return row.glu != nullptr ? schema_of_attributes(*row.glu) : "";
}

template <typename... Numbers>
TypedOp make_forward(const ScaledRow& row) {
  const auto shape = [&row](const Checks& check, const Tensor& input, const Tensor& scales,
                            Numbers... numbers) -> TensorSpecs {
    return {scaled_output(check, with(row, numbers...), input, scales)};
  };
  const auto cpu = [&row](const Tensor& input, const Tensor& scales, Numbers... numbers,
                          Tensor& output) {
    scaled_forward_cpu(with(row, numbers...), input, scales, output);
  };
  const auto cuda = [&row](const Tensor& input, const Tensor& scales, Numbers... numbers,
                           Tensor& output) {
    scaled_forward_cuda(with(row, numbers...), input, scales, output);
  };
  const auto decomposition = [&row](const Tensor& input, const Tensor& scales, Numbers... numbers) {
    return scaled_decomposed(with(row, numbers...), input, scales);
  };
  return {.schema =
              row.name + "(Tensor input, Tensor scales" + attributes_of(row) + ") -> Tensor output",
          .shape = shape,
          .bodies = {cpu, cuda, decomposition},
          .by_rows = {"input", "scales"}};
}

TensorSpecs backward_shape(const Checks& check, const ScaledActivation& activation,
                           const Tensor& grad_output, const Tensor& input, const Tensor& scales,
                           Mask wanted) {
  const auto [wants_input, wants_scales] = wanted;
  check.spec("grad_output", grad_output, scaled_output(check, activation, input, scales));
  return {wants_input ? like(input) : absent(input.scalar_type()),
          wants_scales ? like(scales) : absent(scales.scalar_type())};
}

template <typename... Numbers>
TypedOp make_backward(const ScaledRow& row) {
  return {.schema = row.name + "_backward(Tensor grad_output, Tensor input, Tensor scales" +
                    attributes_of(row) +
                    ", bool[2] output_mask) -> (Tensor grad_input, Tensor grad_scales)",
          .shape = [&row](const Checks& check, const Tensor& grad_output, const Tensor& input,
                          const Tensor& scales, Numbers... numbers, Mask wanted) -> TensorSpecs {
            return backward_shape(check, with(row, numbers...), grad_output, input, scales, wanted);
          },
          .overwrites = {"input"},
          .bodies = {
              .cpu =
                  [&row](const Tensor& grad_output, const Tensor& input, const Tensor& scales,
                         Numbers... numbers, Mask wanted, Tensor& grad_input, Tensor& grad_scales) {
                    const auto [wants_input, wants_scales] = wanted;
                    scaled_backward_cpu(with(row, numbers...), grad_output, input, scales,
                                        wants_input ? grad_input : Tensor(),
                                        wants_scales ? grad_scales : Tensor());
                  },
              .cuda =
                  [&row](const Tensor& grad_output, const Tensor& input, const Tensor& scales,
                         Numbers... numbers, Mask wanted, Tensor& grad_input, Tensor& grad_scales) {
                    const auto [wants_input, wants_scales] = wanted;
                    scaled_backward_cuda(with(row, numbers...), grad_output, input, scales,
                                         wants_input ? grad_input : Tensor(),
                                         wants_scales ? grad_scales : Tensor());
                  }},
          .by_rows = {"grad_output", "input", "scales"}};
}

std::vector<std::string> names_of_attributes(const ScaledRow& row) {
  std::vector<std::string> names = {"activation_recompute_in_mlp"};
  if (row.glu != nullptr)
    std::ranges::copy(names_of_attributes(*row.glu), std::back_inserter(names));
  return names;
}

template <typename... Numbers>
bool register_scaled(const ScaledRow& row) {
  const GluRow* const glu = row.glu;
  return register_op(
      {.declaration = {.kind = row.kind,
                       .summary = "scales[row] " + (glu != nullptr ? glu->formula : "max(x, 0)^2"),
                       .attributes = names_of_attributes(row),
                       .flags = {kCacheQuantizedInput},
                       .extra_inputs = {"scales"},
                       .slots = {{"input"}, {"scales"}},
                       .dtype = DTypeRule::Autocast,
                       .width =
                           [glu](const Attributes&, int64_t width) {
                             return glu == nullptr || width < 0 ? width : width / 2;
                           }},
       .forward = make_forward<Numbers...>(row),
       .backward = make_backward<Numbers...>(row),
       .recompute = recompute_by(make_forward<Numbers...>(row))});
}

bool register_row(const ScaledRow& row) {
  switch (row.glu == nullptr ? 0 : row.glu->attributes.size()) {
    case 0:
      return register_scaled<>(row);
    case 1:
      return register_scaled<int64_t>(row);
    case 3:
      return register_scaled<int64_t, double, double>(row);
    default:
      return register_scaled<int64_t, double, double, double>(row);
  }
}

[[maybe_unused]] const bool registered = std::ranges::all_of(scaled_activations(), register_row);

}  // namespace
}  // namespace transformer_ops::ops::scaled_activation
