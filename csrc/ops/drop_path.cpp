// DropPath: zeroes whole samples (the first dimension) with probability p and scales the rest by 1
// / (1 - p). It saves that factor for each sample. The numbers are drawn as Dropout does.
#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/dropout.h"
#include "wrappers/row_scale.h"

namespace transformer_ops::ops::drop_path {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, double p) {
  check.compute_dtype("input", input);
  check_probability(check, p);
  return {like(input), sample_factors(check, input)};
}

void forward_cpu(const Tensor& input, double p, Tensor& output, Tensor& factors) {
  draw_factors_cpu(p, factors);
  scale_rows_cpu(input, nullptr, factors, nullptr, output);
}

void forward_cuda(const Tensor& input, double p, Tensor& output, Tensor& factors) {
  draw_factors_cuda(p, factors);
  scale_rows_cuda(input, nullptr, factors, nullptr, output);
}

Tensor forward_decomposed(const Tensor& input, double p) {
  return scale_rows_decomposed(input, nullptr, draw_factors_decomposed(input, p));
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& factors) {
  check.compute_dtype("grad_output", grad_output);
  check.spec("factors", factors, sample_factors(check, grad_output));
  return {like(grad_output)};
}

void backward_cpu(const Tensor& grad_output, const Tensor& factors, Tensor& grad_input) {
  scale_rows_cpu(grad_output, nullptr, factors, nullptr, grad_input);
}

void backward_cuda(const Tensor& grad_output, const Tensor& factors, Tensor& grad_input) {
  scale_rows_cuda(grad_output, nullptr, factors, nullptr, grad_input);
}

Tensor backward_decomposed(const Tensor& grad_output, const Tensor& factors) {
  return scale_rows_decomposed(grad_output, nullptr, factors);
}

// Recomputing applies the same factors as backward.
TypedOp make_recompute() {
  return recompute_by({.schema = "drop_path(Tensor input, Tensor factors) -> Tensor output",
                       .shape = backward_shape,
                       .overwrites = {"input"},
                       .bodies = {backward_cpu, backward_cuda, backward_decomposed}});
}

// If there are no factors, nothing was dropped, or no gradient passes.
Tensor replay(const ReplayCall& call) {
  const Tensor factors = call.slot("factors");
  return factors.defined() ? backward_decomposed(call.input, factors) : call.input;
}

[[maybe_unused]] const bool registered = register_op({
    .declaration =
        {
            .kind = "DropPath",
            .summary = "x / (1 - p) for each sample that is not dropped, else 0",
            .attributes = {"p"},
            .slots = {{"factors"}},
            .inactive =
                [](const Attributes& attributes, bool training) {
                  return !training || std::get<double>(attributes.at("p")) == 0;
                },
        },
    .forward = {.schema = "drop_path(Tensor input, float p) -> (Tensor output, Tensor factors)",
                .shape = forward_shape,
                .overwrites = {"input"},
                .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                .random = true},
    .backward = {.schema =
                     "drop_path_backward(Tensor grad_output, Tensor factors) -> Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {"grad_output"},
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed}},
    .recompute = make_recompute(),
    .replay = replay,
});

}  // namespace
}  // namespace transformer_ops::ops::drop_path
