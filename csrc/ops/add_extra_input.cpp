// AddExtraInput: y = x + extra, as in a residual connection. Both get the output's gradient.
#include <ATen/ops/add.h>

#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const Tensor& input = args.tensor(0);
  const Tensor& extra = args.tensor(1);
  check_compute_dtype(args, "input", input);
  check_compute_dtype(args, "extra_input", extra);
  check_same_sizes(args, "extra_input", extra, input);
  return {{c10::SymDimVector(input.sym_sizes()),
           c10::promoteTypes(input.scalar_type(), extra.scalar_type())}};
}

void add(const Args& args, Tensors& results) {
  at::add_out(results[0], args.tensor(0), args.tensor(1));
}

Tensors add_unfused(const Args& args) { return {args.tensor(0) + args.tensor(1)}; }

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "AddExtraInput",
                    .summary = "x + extra",
                    .attributes = {"in_place"},
                    .extra_inputs = {"extra_input"},
                    .dtype = DTypeRule::Promote},
    .forward = {.schema = "add_extra_input(Tensor input, Tensor extra_input) -> Tensor output",
                .shape = shape,
                .overwrites = {0, 1},
                .cpu = add,
                .cuda = add,
                .unfused = add_unfused},
});

}  // namespace
}  // namespace transformer_ops
