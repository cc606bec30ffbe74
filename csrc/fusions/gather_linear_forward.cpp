// forward:  x ─► AllGather ─► BasicLinear ─► [Bias] ─► y
//                   └─────────────┘ gathered: if backward reads it
//
//   Rows of x are gathered in chunks, each while the product of the chunk before runs.
#include <ATen/ops/linear.h>

#include "op/op.h"
#include "wrappers/bias.h"
#include "wrappers/linear.h"
#include "wrappers/parallel_linear.h"

namespace transformer_ops::fused::gather_linear_forward {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& input, const Tensor& weight,
                  const Tensor* bias, int64_t group_size, std::string_view, bool save_gathered) {
  TensorSpec output = linear_output(check, input, weight, bias);
  output.sizes[0] = gathered_rows(check, input, group_size);
  const TensorSpec whole = gathered(check, "input", input, group_size);
  return {output, save_gathered ? whole : absent(whole.dtype)};
}

void forward(const Checks& check, const Tensor& input, const Tensor& weight,
             const Tensor* bias_or_none, int64_t group_size, std::string_view group,
             bool save_gathered, Tensor& output, Tensor& whole) {
  const Ranks ranks{group_size, group};
  const Tensor bias = or_undefined(bias_or_none);
  gather_beside(
      check, input, ranks, kLeastRows, save_gathered ? whole : Tensor(), output,
      [&](const Tensor& rows, const Tensor& into) { parallel_product(rows, weight, bias, into); });
}

std::tuple<Tensor, Tensor> forward_decomposed(const Checks& check, const Tensor& input,
                                              const Tensor& weight, const Tensor* bias,
                                              int64_t group_size, std::string_view group,
                                              bool save_gathered) {
  const Tensor whole = gather_decomposed(check, input, group_size, group);
  return {at::linear(whole, weight, or_undefined(bias)), save_gathered ? whole : Tensor()};
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "gather_linear",
             .pass = Pass::Forward,
             // runs before linear_epilogue, and after the rules that save a pass over the output
             .benefit = 46,
             .pattern = {{"AllGather"}, {"BasicLinear"}, optional_op({"Bias"})},
             .why_not = [](const Match& match) -> std::optional<std::string> {
               const Analysis& analysis = match.analysis;
               if (analysis.dtypes()[match.places[0]] != analysis.compute_dtype(match.places[1])) {
                 return "the input is cast before the product";
               }
               return different_bias_dtype(match, 1);
             },
             .bind =
                 [](const Match&) {
                   return Bindings{{"gathered", Field{1, "input"}}};
                 }},
    .forward = {.schema = "gather_linear(Tensor input, Tensor weight, Tensor? bias, "
                          "int group_size, str group, bool save_gathered) -> "
                          "(Tensor output, Tensor gathered)",
                .shape = shape,
                .products = {.list = {{"weight"}}},
                .bodies = {forward, forward, forward_decomposed}},
});

}  // namespace
}  // namespace transformer_ops::fused::gather_linear_forward
