// forward:  x ─► BasicLinear ─► [Bias] ─► ReduceScatter ─► y
//
//   rows of y are made in chunks: the sums of one are scattered beside the product of the next
#include <ATen/ops/linear.h>

#include "bodies/bias.h"
#include "bodies/linear.h"
#include "bodies/parallel_linear.h"
#include "op/buffer.h"
#include "op/op.h"

namespace transformer_ops::fused::linear_scatter {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& input, const Tensor& weight,
                  const Tensor* bias, int64_t group_size, std::string_view) {
  TensorSpec output = linear_output(check, input, weight);
  if (bias != nullptr) check_linear_bias(check, *bias, output);
  output.sizes[0] = scattered_rows(check, input, group_size);
  return {output};
}

void forward(const Checks& check, const Tensor& input, const Tensor& weight,
             const Tensor* bias_or_none, int64_t group_size, std::string_view group,
             Tensor& output) {
  const Ranks ranks{group_size, group};
  const Tensor bias = or_undefined(bias_or_none);
  const int64_t rows = output.size(0);
  auto sizes = output.sizes().vec();
  std::vector<Tensor> started;
  for (const auto& [first, count] : chunks_of(output)) {
    // The same rows of every rank, one after another.
    sizes[0] = group_size * count;
    const Tensor sums = empty(sizes, output.scalar_type(), output.device());
    for (int64_t rank = 0; rank < group_size; ++rank) {
      parallel_product(input.narrow(0, rank * rows + first, count), weight, bias,
                       sums.narrow(0, rank * count, count));
    }
    started.push_back(output.narrow(0, first, count));
    start_scatter(check, sums, ranks, started.back());
  }
  for (const Tensor& part : started) finish(check, ranks, part);
}

Tensor forward_unfused(const Checks& check, const Tensor& input, const Tensor& weight,
                       const Tensor* bias, int64_t group_size, std::string_view group) {
  return scatter_unfused(check, at::linear(input, weight, or_undefined(bias)), group_size, group);
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_scatter",
             .pass = Pass::Forward,
             // Before linear_epilogue, which would take the product and its bias.
             .benefit = 46,
             .pattern = {{"BasicLinear"}, optional_op({"Bias"}), {"ReduceScatter"}},
             .why_not = [](const Match& match) { return different_bias_dtype(match, 0); }},
    .forward = {.schema = "linear_scatter(Tensor input, Tensor weight, Tensor? bias, "
                          "int group_size, str group) -> Tensor output",
                .shape = shape,
                .bodies = {forward, forward, forward_unfused}},
});

}  // namespace
}  // namespace transformer_ops::fused::linear_scatter
