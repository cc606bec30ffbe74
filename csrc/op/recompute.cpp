#include "op/recompute.h"

#include "op/defaults.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs cast_shape(const Checks& check, const Tensor& grad_output, const Tensor& input) {
  check.compute_dtype("grad_output", grad_output);
  check.compute_dtype("input", input);
  return {{c10::SymDimVector(input.sym_sizes()), grad_output.scalar_type()}};
}

void cast(const Tensor&, const Tensor& input, Tensor& output) { output.copy_(input); }

Tensor cast_unfused(const Tensor& grad_output, const Tensor& input) {
  return input.to(grad_output.scalar_type());
}

// An input that forward saved before a cast, in the dtype that the reading step takes.
[[maybe_unused]] const bool registered = register_op({
    .recompute = {.schema = "recompute_cast(Tensor grad_output, Tensor input) -> Tensor output",
                  .shape = cast_shape,
                  .bodies = {.cpu = cast, .cuda = cast, .unfused = cast_unfused},
                  .reads_first = false},
});

}  // namespace

TypedOp recompute_by(TypedOp op) {
  complete(op);
  op.schema = "recompute_" + op.schema;
  op.schema.insert(op.schema.find('(') + 1, "Tensor grad_output, ");
  for (TypedFunction* function :
       {static_cast<TypedFunction*>(&op.shape), static_cast<TypedFunction*>(&op.bodies.cpu),
        static_cast<TypedFunction*>(&op.bodies.cuda),
        static_cast<TypedFunction*>(&op.bodies.unfused)}) {
    function->skip_first();
  }
  op.reads_first = false;
  return op;
}

}  // namespace transformer_ops
