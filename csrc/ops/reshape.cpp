// Reshape: torch's own op. Forward reshapes to the given shape, backward to that of the input.
#include "op/op.h"

namespace transformer_ops::ops::reshape {
namespace {

// The last size; -1 if it follows from the input.
int64_t width(const Attributes& attributes, int64_t) {
  const auto& shape = std::get<std::vector<int64_t>>(attributes.at("shape"));
  return shape.empty() ? 1 : shape.back();
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "Reshape",
                    .summary = "reshape(x, shape)",
                    .attributes = {"shape"},
                    .width = width},
    .forward = {.schema = "aten::reshape(Tensor input, SymInt[] shape) -> Tensor output"},
    .backward = {.schema = "aten::reshape(Tensor grad_output, SymInt[] input_shape) -> "
                           "Tensor grad_input"},
    .recompute = {.schema = "aten::reshape(Tensor input, SymInt[] shape) -> Tensor output"},
});

}  // namespace
}  // namespace transformer_ops::ops::reshape
