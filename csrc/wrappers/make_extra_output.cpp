#include "wrappers/make_extra_output.h"

namespace transformer_ops {

std::optional<std::string> no_extra_gradient(const Match& match) {
  if (!match.input_requires_grad()) return "its input needs no gradient";
  if (!match.extra_output_is_read(0)) return "nobody reads the extra output";
  return std::nullopt;
}

TensorSpec with_extra_gradient(const Checks& check, const TensorSpec& grad_input,
                               const Tensor& grad_extra_output) {
  check.compute_dtype("grad_extra_output", grad_extra_output);
  const auto dtype = c10::promoteTypes(grad_input.dtype, grad_extra_output.scalar_type());
  check.spec("grad_extra_output", grad_extra_output,
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
