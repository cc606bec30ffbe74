// forward:  x ─► [LayerScale] ─► [DropPath] ─► AddExtraInput ─► y      one pass
//                                    └───► factors     ▲ residual
// backward: g ─► DropPath' ─► LayerScale' ─► g          one pass over the rows
//                                  └─► sum over rows: grad_gamma
#include "fuser/registry.h"
#include "op/op.h"
#include "wrappers/add_extra_input.h"
#include "wrappers/dropout.h"
#include "wrappers/row_scale.h"

namespace transformer_ops::fused::scale_drop_add {
namespace {

// ---- forward

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor* gamma,
                          const Tensor& extra_input, double p) {
  check_gamma(check, input, gamma);
  check_extra_input(check, extra_input, like(input));
  check_probability(check, p);
  return {like(input),
          p > 0 ? sample_factors(check, input) : absent(accumulate_dtype(input.scalar_type()))};
}

void forward_cpu(const Tensor& input, const Tensor* gamma, const Tensor& extra_input, double p,
                 Tensor& output, Tensor& factors) {
  if (p > 0) draw_factors_cpu(p, factors);
  scale_rows_cpu(input, gamma, p > 0 ? factors : Tensor(), &extra_input, output);
}

void forward_cuda(const Tensor& input, const Tensor* gamma, const Tensor& extra_input, double p,
                  Tensor& output, Tensor& factors) {
  if (p > 0) draw_factors_cuda(p, factors);
  scale_rows_cuda(input, gamma, p > 0 ? factors : Tensor(), &extra_input, output);
}

Tensor forward_decomposed(const Tensor& input, const Tensor* gamma, const Tensor& extra_input,
                          double p) {
  const Tensor x = to_accumulate(input);
  const Tensor factors = p > 0 ? draw_factors_decomposed(input, p) : Tensor();
  return (scale_rows_decomposed(x, gamma, factors) + extra_input).to(extra_input.scalar_type());
}

std::optional<std::string> why_not_add(const Match& match) {
  if (!match.has(0) && match.is_idle(1)) return "no path is dropped";
  return different_summands(match, 2);
}

bool drops(const Match& match) { return match.has(1) && !match.is_idle(1); }

Bindings bind(const Match& match) {
  if (drops(match)) return {{"factors", Field{1, "factors"}}};
  return {{"p", Attribute(0.0)}};
}

// ---- backward

// Without factors, no sample was dropped.
TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor* input,
                           const Tensor* gamma, const Tensor& factors, ScaleMask wanted) {
  TensorSpecs specs = scale_backward_shape(check, grad_output, input, gamma, wanted);
  const TensorSpec wanted_factors = sample_factors(check, grad_output);
  const bool is_absent = factors.dim() == 1 && factors.sym_size(0) == 0;
  check.spec("factors", factors, is_absent ? absent(wanted_factors.dtype) : wanted_factors);
  return specs;
}

Tensor given(const Tensor& factors, const Tensor& like) {
  return factors.sym_size(0) == 0 && like.sym_size(0) > 0 ? Tensor() : factors;
}

void backward_cpu(const Tensor& grad_output, const Tensor* input, const Tensor* gamma,
                  const Tensor& factors, ScaleMask wanted, Tensor& grad_input, Tensor& grad_gamma) {
  scale_backward_cpu(grad_output, input, gamma, given(factors, grad_output), wanted, grad_input,
                     grad_gamma);
}

void backward_cuda(const Tensor& grad_output, const Tensor* input, const Tensor* gamma,
                   const Tensor& factors, ScaleMask wanted, Tensor& grad_input,
                   Tensor& grad_gamma) {
  scale_backward_cuda(grad_output, input, gamma, given(factors, grad_output), wanted, grad_input,
                      grad_gamma);
}

std::tuple<Tensor, Tensor> backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                               const Tensor* gamma, const Tensor& factors,
                                               ScaleMask wanted) {
  return scale_backward_decomposed(grad_output, input, gamma, given(factors, grad_output), wanted);
}

std::optional<std::string> why_not_together(const Match& match) {
  if (match.is_idle(1)) return "no path is dropped";
  return std::nullopt;
}

// ---- rules

TypedOp forward_op() {
  return {.schema =
              "scale_drop_add(Tensor input, Tensor? gamma, Tensor extra_input, float p) -> "
              "(Tensor output, Tensor factors)",
          .shape = forward_shape,
          .overwrites = {"input", "extra_input"},
          .bodies = {forward_cpu, forward_cuda, forward_decomposed},
          .random = true};
}

// A caller of the forward op itself gets gradients that use the factors it drew.
bool register_rules() {
  add_rule({.name = "scale_drop_add",
            .pass = Pass::Forward,
            .benefit = 30,
            .pattern = {optional_op({"LayerScale"}), optional_op({"DropPath"}), {"AddExtraInput"}},
            .why_not = why_not_add,
            .forward = forward_op().schema,
            .bind = bind});
  register_typed_op(forward_op());
  const bool registered = register_fused_op(
      {.rule = {.name = "layer_scale_drop_path",
                .pass = Pass::Backward,
                .benefit = 20,
                .pattern = {{"LayerScale"}, {"DropPath"}},
                .why_not = why_not_together},
       .backward = {.schema = "layer_scale_drop_path_backward(Tensor grad_output, Tensor? input, "
                              "Tensor? gamma, Tensor factors, bool[2] output_mask) -> "
                              "(Tensor grad_input, Tensor grad_gamma)",
                    .shape = backward_shape,
                    .overwrites = {"grad_output"},
                    .bodies = {backward_cpu, backward_cuda, backward_decomposed}}});
  add_typed_op_pair({"scale_drop_add", "layer_scale_drop_path_backward"});
  return registered;
}

[[maybe_unused]] const bool registered = register_rules();

}  // namespace
}  // namespace transformer_ops::fused::scale_drop_add
