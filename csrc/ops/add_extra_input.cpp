// AddExtraInput: y = x + extra, as in a residual connection. Both get the output's gradient.
#include <ATen/ops/add.h>

#include "op/op.h"

namespace transformer_ops::ops::add_extra_input {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& input, const Tensor& extra_input) {
  check.compute_dtype("input", input);
  check.compute_dtype("extra_input", extra_input);
  check.same_sizes("extra_input", extra_input, input);
  return {{c10::SymDimVector(input.sym_sizes()),
           c10::promoteTypes(input.scalar_type(), extra_input.scalar_type())}};
}

void add(const Tensor& input, const Tensor& extra_input, Tensor& output) {
  at::add_out(output, input, extra_input);
}

Tensor add_decomposed(const Tensor& input, const Tensor& extra_input) {
  return input + extra_input;
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "AddExtraInput",
                    .summary = "x + extra",
                    .attributes = {"in_place"},
                    .extra_inputs = {"extra_input"},
                    .dtype = DTypeRule::Promote},
    .forward = {.schema = "add_extra_input(Tensor input, Tensor extra_input) -> Tensor output",
                .shape = shape,
                .overwrites = {"input", "extra_input"},
                .bodies = {add, add, add_decomposed},
                .by_rows = {"input", "extra_input"}},
});

}  // namespace
}  // namespace transformer_ops::ops::add_extra_input
