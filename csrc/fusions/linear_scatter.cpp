// forward:  x ─► BasicLinear ─► [Bias] ─► ReduceScatter ─► y
//
//   Rows of y are computed in chunks: the sums of one are scattered while the product of the next
//   runs.
#include <ATen/ops/linear.h>

#include "op/buffer.h"
#include "op/op.h"
#include "wrappers/bias.h"
#include "wrappers/linear.h"
#include "wrappers/parallel_linear.h"

namespace transformer_ops::fused::linear_scatter {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& input, const Tensor& weight,
                  const Tensor* bias, int64_t group_size, std::string_view) {
  TensorSpec output = linear_output(check, input, weight, bias);
  output.sizes[0] = scattered_rows(check, input, group_size);
  return {output};
}

void forward(const Checks& check, const Tensor& input, const Tensor& weight,
             const Tensor* bias_or_none, int64_t group_size, std::string_view group,
             Tensor& output) {
  const Ranks ranks{group_size, group};
  const Tensor bias = or_undefined(bias_or_none);
  auto sizes = output.sizes().vec();
  sizes[0] = input.size(0);
  const Tensor sums = empty(sizes, output.scalar_type(), output.device());
  for (const Chunk& chunk : chunks_of(output, ranks, kLeastRows)) {
    const Tensor part = sums.narrow(0, group_size * chunk.first, group_size * chunk.count);
    const Tensor rows = rows_of_ranks(input, ranks, chunk).flatten(0, 1);
    parallel_product(rows.contiguous(), weight, bias, part);
    Tensor into = output.narrow(0, chunk.first, chunk.count);
    start_scatter(check, part, ranks, into);
  }
  // Torch finds started collectives by their memory, so one call waits for all of them.
  finish(check, ranks, output);
}

Tensor forward_decomposed(const Checks& check, const Tensor& input, const Tensor& weight,
                          const Tensor* bias, int64_t group_size, std::string_view group) {
  return scatter_decomposed(check, at::linear(input, weight, or_undefined(bias)), group_size,
                            group);
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_scatter",
             .pass = Pass::Forward,
             // runs before linear_epilogue, which would take the product and its bias
             .benefit = 46,
             .pattern = {{"BasicLinear"}, optional_op({"Bias"}), {"ReduceScatter"}},
             .why_not = [](const Match& match) { return different_bias_dtype(match, 0); }},
    .forward = {.schema = "linear_scatter(Tensor input, Tensor weight, Tensor? bias, "
                          "int group_size, str group) -> Tensor output",
                .shape = shape,
                .products = {.list = {{"weight"}}, .rows = "input"},
                .bodies = {forward, forward, forward_decomposed}},
});

}  // namespace
}  // namespace transformer_ops::fused::linear_scatter
