// Gated linear units: y = act(a) * b, where a and b are the halves of the last dimension, or blocks
// of glu_interleave_size elements that alternate along it.
#include <algorithm>

#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/glu.h"

namespace transformer_ops::ops::glu {
namespace {

template <typename... Numbers>
TypedOp make_forward(const GluRow& row) {
  const auto shape = [&row](const Checks& check, const Tensor& input,
                            Numbers... numbers) -> TensorSpecs {
    check.compute_dtype("input", input);
    return {glu_output(check, "input", like(input), glu_with(row, numbers...))};
  };
  const auto cpu = [&row](const Tensor& input, Numbers... numbers, Tensor& output) {
    glu_forward_cpu(glu_with(row, numbers...), input, output);
  };
  const auto cuda = [&row](const Tensor& input, Numbers... numbers, Tensor& output) {
    glu_forward_cuda(glu_with(row, numbers...), input, output);
  };
  const auto decomposition = [&row](const Tensor& input, Numbers... numbers) {
    return glu_decomposed(row, input, glu_with(row, numbers...));
  };
  return {.schema = row.name + "(Tensor input" + schema_of_attributes(row) + ") -> Tensor output",
          .shape = shape,
          .bodies = {cpu, cuda, decomposition},
          .by_rows = {"input"}};
}

template <typename... Numbers>
TypedOp make_backward(const GluRow& row) {
  return {
      .schema = row.name + "_backward(Tensor grad_output, Tensor input" +
                schema_of_attributes(row) + ") -> Tensor grad_input",
      .shape = [&row](const Checks& check, const Tensor& grad_output, const Tensor& input,
                      Numbers... numbers) -> TensorSpecs {
        check.compute_dtype("input", input);
        check.spec("grad_output", grad_output,
                   glu_output(check, "input", like(input), glu_with(row, numbers...)));
        return {like(input)};
      },
      .overwrites = {"input"},
      .bodies = {.cpu =
                     [&row](const Tensor& grad_output, const Tensor& input, Numbers... numbers,
                            Tensor& grad_input) {
                       glu_backward_cpu(glu_with(row, numbers...), grad_output, input, grad_input);
                     },
                 .cuda =
                     [&row](const Tensor& grad_output, const Tensor& input, Numbers... numbers,
                            Tensor& grad_input) {
                       glu_backward_cuda(glu_with(row, numbers...), grad_output, input, grad_input);
                     }},
      .by_rows = {"grad_output", "input"}};
}

// `Numbers` are the types of the row's numbers.
template <typename... Numbers>
bool register_glu(const GluRow& row) {
  return register_op(
      {.declaration = {.kind = row.kind,
                       .summary = row.formula,
                       .attributes = names_of_attributes(row),
                       .flags = {kCacheQuantizedInput},
                       .slots = {{"input"}},
                       .dtype = DTypeRule::Autocast,
                       .width = [](const Attributes&,
                                   int64_t width) { return width < 0 ? -1 : width / 2; }},
       .forward = make_forward<Numbers...>(row),
       .backward = make_backward<Numbers...>(row),
       .recompute = recompute_by(make_forward<Numbers...>(row))});
}

bool register_row(const GluRow& row) {
  switch (row.attributes.size()) {
    case 0:
      return register_glu<>(row);
    case 1:
      return register_glu<int64_t>(row);
    case 3:
      return register_glu<int64_t, double, double>(row);
    case 4:
      return register_glu<int64_t, double, double, double>(row);
  }
  TORCH_CHECK(false, "[", row.name, "] attributes must be 0, 1, 3 or 4, got ",
              row.attributes.size());
}

[[maybe_unused]] const bool registered = std::ranges::all_of(glus(), register_row);

}  // namespace
}  // namespace transformer_ops::ops::glu
