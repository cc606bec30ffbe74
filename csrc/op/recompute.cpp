#include "op/recompute.h"

#include <array>
#include <utility>

#include "fuser/quantize.h"
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

TypedOp behind_gradient(TypedOp op) {
  complete(op);
  op.schema.insert(op.schema.find('(') + 1, "Tensor grad_output, ");
  for (TypedFunction* function : functions_of(op)) function->skip_first();
  op.reads_first = false;
  return op;
}

// Removes the last result: "-> (Tensor output, Tensor amax)" loses amax.
void drop_last_result(TypedOp& op) {
  op.schema.erase(op.schema.rfind(", "));
  const size_t results = op.schema.find("-> (") + 3;
  if (op.schema.find(',', results) == std::string::npos) {
    op.schema.erase(results, 1);
  } else {
    op.schema += ')';
  }
  for (TypedFunction* function : functions_of(op)) function->drop_last_result();
}

}  // namespace

TypedOp recompute_by(TypedOp op) {
  op = behind_gradient(std::move(op));
  op.schema = "recompute_" + op.schema;
  return op;
}

namespace {

void register_for_backward(const TypedOp& op, LastResult last) {
  TypedOp saved = behind_gradient(op);
  saved.schema.insert(saved.schema.find('('), kSaved);
  if (last == LastResult::InForward) drop_last_result(saved);
  register_plan_op(std::move(saved));
}

}  // namespace

void register_for_both_passes(const TypedOp& op, LastResult last) {
  register_typed_op(op);
  register_for_backward(op, last);
}

void register_plan_op_for_both_passes(const TypedOp& op, LastResult last) {
  register_plan_op(op);
  register_for_backward(op, last);
}

}  // namespace transformer_ops
