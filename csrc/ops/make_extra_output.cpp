// MakeExtraOutput: hands its input out a second time; backward adds the two gradients.
#include <ATen/ops/add.h>

#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs backward_shape(const Args& args) {
  check_compute_dtype(args, "grad_output", args.tensor(0));
  check_compute_dtype(args, "grad_extra_output", args.tensor(1));
  check_same_sizes(args, "grad_extra_output", args.tensor(1), args.tensor(0));
  return {like(args.tensor(0))};
}

Tensors backward_unfused(const Args& args) {
  // A channel may lead to an op that computes in another dtype.
  return {(args.tensor(0) + args.tensor(1)).to(args.tensor(0).scalar_type())};
}

void backward(const Args& args, Tensors& results) {
  at::add_out(results[0], args.tensor(0), args.tensor(1));
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "MakeExtraOutput",
                    .summary = "x, twice",
                    .attributes = {"in_place"},
                    .extra_outputs = {"extra_output"}},
    .backward = {.schema = "make_extra_output_backward(Tensor grad_output, "
                           "Tensor grad_extra_output) -> Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {0, 1},
                 .cpu = backward,
                 .cuda = backward,
                 .unfused = backward_unfused},
});

}  // namespace
}  // namespace transformer_ops
