#include "op/recompute.h"

#include <array>
#include <utility>

#include "fuser/quantize.h"
#include "fuser/schema.h"
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

Tensor cast_decomposed(const Tensor& grad_output, const Tensor& input) {
  return input.to(grad_output.scalar_type());
}

// Casts an input that forward saved before a cast to the dtype that the reading step takes.
[[maybe_unused]] const bool registered = register_op({
    .recompute = {.schema = "recompute_cast(Tensor grad_output, Tensor input) -> Tensor output",
                  .shape = cast_shape,
                  .bodies = {.cpu = cast, .cuda = cast, .decomposition = cast_decomposed},
                  .reads_first = false},
});

std::array<TypedFunction*, 4> functions_of(TypedOp& op) {
  return {&op.shape, &op.bodies.cpu, &op.bodies.cuda, &op.bodies.decomposition};
}

// Adds the gradient to an op, and `prefix` and `suffix` to its name.
TypedOp behind_gradient(TypedOp op, const std::string& prefix, const std::string& suffix) {
  complete(op);
  Schema schema = parse_schema(op.schema);
  schema.name = prefix + schema.name + suffix;
  schema.arguments.insert(schema.arguments.begin(), {"Tensor", "grad_output"});
  if (op.last_in_forward) schema.results.pop_back();
  op.schema = to_text(schema);
  op.reads_first = false;
  for (TypedFunction* function : functions_of(op)) {
    function->skip_first();
    if (op.last_in_forward) function->drop_last_result();
  }
  return op;
}

}  // namespace

TypedOp recompute_by(TypedOp op) { return behind_gradient(std::move(op), "recompute_", ""); }

std::optional<TypedOp> saved_form(const TypedOp& op) {
  if (op.differentiable) return std::nullopt;
  return behind_gradient(op, "", kSaved);
}

}  // namespace transformer_ops
