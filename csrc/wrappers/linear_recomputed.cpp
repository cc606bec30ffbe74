#include "wrappers/linear_recomputed.h"

#include <ATen/ops/matmul.h>

#include <algorithm>

#include "fuser/recompute.h"
#include "op/buffer.h"
#include "wrappers/linear.h"
#include "wrappers/product.h"

namespace transformer_ops {
namespace {

// The number of columns of a slice. Wider slices are faster: whole products, with their pass, took
// 0.92 to 0.97 of the time of 2 MB slices. A slice takes as much memory as the weight gradient of
// the Linear before this one will need. That weight has `before` columns and about as many rows as
// this one has columns.
int64_t slice_width(int64_t rows, const Tensor& weight, int64_t before, int64_t unit) {
  constexpr int64_t kLeast = 512;
  const int64_t columns = weight.size(1);
  const int64_t most = std::max(kLeast, weight.size(0) * before / std::max<int64_t>(1, rows));
  const int64_t count = std::max<int64_t>(1, (columns + most - 1) / most);
  const int64_t width = std::max<int64_t>(1, (columns + count - 1) / count);
  return std::min((width + unit - 1) / unit * unit, columns);
}

}  // namespace

std::optional<std::string> why_not_recomputed(const Match& match, int k) {
  const bool recomputes = match.key().policies.recompute != Recompute::None ||
                          asks_for_recompute(match.op(k).attributes);
  if (!recomputes) return "nothing is recomputed (recompute=\"none\")";
  if (!match.parameter_requires_grad(k + 1, 0)) return "the weight needs no gradient";
  if (!match.input_requires_grad()) return "the input needs no gradient";
  const auto& dtypes = match.analysis.dtypes();
  const DType dtype = dtypes[match.first()];
  for (const int op : match.places) {
    if (op < 0) continue;
    if (dtypes[op] != dtype || match.analysis.compute_dtype(op) != dtype) {
      return "its ops compute in different dtypes";
    }
  }
  return std::nullopt;
}

void linear_recomputed_cpu(const Call& call, const Tensor& grad_output, const Tensor& weight,
                           RecomputedParts wanted, const Tensor& grad_weight, int64_t before,
                           int64_t unit,
                           c10::function_ref<void(const Tensor& buffer, int64_t first)> pass) {
  const Tensor grad = as_matrix(grad_output);
  const int64_t rows = grad.size(0);
  const int64_t width = slice_width(rows, weight, before, unit);
  for (int64_t first = 0; first < weight.size(1); first += width) {
    const int64_t count = std::min(width, weight.size(1) - first);
    Tensor buffer = empty_cpu({rows, count}, grad.scalar_type());
    if (wanted.grad_y) {
      product_cpu(buffer, grad, weight.narrow(1, first, count), /*adds=*/false);
    } else {
      buffer.zero_();
    }
    pass(buffer, first);
    if (!wanted.weight) continue;
    // oneDNN's copies of the operands take 2.0 MB for 1024 columns and 2.7 MB for twice as many.
    const int64_t part = grad.scalar_type() == at::kBFloat16 ? 1024 : count;
    for (int64_t column = 0; column < count; column += part) {
      const int64_t columns = std::min(part, count - column);
      product_cpu(grad_weight.narrow(1, first + column, columns), transposed(grad),
                  buffer.narrow(1, column, columns), call.main_grad().adds);
    }
  }
}

std::tuple<Tensor, Tensor> linear_recomputed_decomposed(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, RecomputedParts wanted,
    c10::function_ref<Tensor(const Tensor&)> function) {
  Tensor grad_input, grad_weight;
  if (wanted.grad_y) {
    grad_input = gradients(function, at::matmul(grad_output, weight), input)[0];
  }
  if (wanted.weight) grad_weight = as_matrix(grad_output).t().mm(as_matrix(function(input)));
  return {grad_input, grad_weight};
}

}  // namespace transformer_ops
