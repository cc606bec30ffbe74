// MakeExtraOutput: also returns its input as an extra output; backward adds the two gradients.
#include <ATen/ops/add.h>

#include "op/op.h"

namespace transformer_ops::ops::make_extra_output {
namespace {

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output,
                           const Tensor& grad_extra_output) {
  check.compute_dtype("grad_output", grad_output);
  check.compute_dtype("grad_extra_output", grad_extra_output);
  check.same_sizes("grad_extra_output", grad_extra_output, grad_output);
  return {like(grad_output)};
}

Tensor backward_decomposed(const Tensor& grad_output, const Tensor& grad_extra_output) {
  // A channel may lead to an op that computes in another dtype.
  return (grad_output + grad_extra_output).to(grad_output.scalar_type());
}

void backward(const Tensor& grad_output, const Tensor& grad_extra_output, Tensor& grad_input) {
  at::add_out(grad_input, grad_output, grad_extra_output);
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "MakeExtraOutput",
                    .summary = "x; an extra output is x, too",
                    .attributes = {"in_place"},
                    .extra_outputs = {"extra_output"}},
    .backward = {.schema = "make_extra_output_backward(Tensor grad_output, "
                           "Tensor grad_extra_output) -> Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {"grad_output", "grad_extra_output"},
                 .bodies = {backward, backward, backward_decomposed}},
});

}  // namespace
}  // namespace transformer_ops::ops::make_extra_output
