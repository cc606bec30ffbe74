// MakeExtraOutput: hands its input out a second time; backward adds the two gradients.
#include "ops/make_extra_output.h"

#include <ATen/ops/add.h>

#include "ops/op.h"

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
                    .extra_outputs = 1},
    .backward = {.schema = "make_extra_output_backward(Tensor grad_output, "
                           "Tensor grad_extra_output) -> Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {0, 1},
                 .cpu = backward,
                 .cuda = backward,
                 .unfused = backward_unfused},
});

}  // namespace

std::optional<std::string> no_extra_gradient(const Match& match) {
  if (!match.input_requires_grad()) return "its input needs no gradient";
  if (!match.extra_output_is_read(0)) return "nobody reads the extra output";
  return std::nullopt;
}

TensorSpec with_extra_gradient(const Args& args, const TensorSpec& grad_input,
                               const Tensor& grad_extra_output, bool wanted) {
  TORCH_CHECK(wanted, "[", args.op(), "] output_mask must ask for grad_input, got false");
  check_compute_dtype(args, "grad_extra_output", grad_extra_output);
  const auto dtype = c10::promoteTypes(grad_input.dtype, grad_extra_output.scalar_type());
  check_spec(args, "grad_extra_output", grad_extra_output,
             {grad_input.sizes, grad_extra_output.scalar_type()});
  return {grad_input.sizes, dtype};
}

ExtraGradient::ExtraGradient(const Tensor& grad_extra_output, const Tensor& input,
                             const Tensor& sum)
    : gradient(grad_extra_output.to(sum.scalar_type())), dtype(input.scalar_type()) {
  const bool fits = sum.scalar_type() == dtype || sum.scalar_type() == accumulate_dtype(dtype);
  if (!fits) dtype = sum.scalar_type();
  wide = sum.scalar_type() != dtype;
}

}  // namespace transformer_ops
