#include "wrappers/packed_linear.h"

#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "wrappers/bias.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"
#include "wrappers/product.h"
#include "wrappers/widened_product.h"

namespace transformer_ops {
namespace {

std::string numbered(const char* list, size_t i) { return list + std::to_string(i); }

int64_t total(at::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// Calls function(i, first) for the columns of each weight.
template <typename Function>
void for_each_part(at::IntArrayRef columns, const Function& function) {
  int64_t first = 0;
  for (size_t i = 0; i < columns.size(); ++i) {
    function(i, first);
    first += columns[i];
  }
}

// All biases in one tensor; a copy of them is small.
Tensor bias_of_all(const Tensors& bias) {
  const Tensor whole = joined(bias);
  return whole.defined() ? whole : at::cat(bias);
}

// Raises unless each weight is a matrix of this dtype with a row for each of its output columns,
// and all sum over the same number of columns, which is returned.
c10::SymInt check_weights(const Checks& check, const Tensors& weight, at::IntArrayRef columns,
                          at::ScalarType dtype) {
  TORCH_CHECK(!weight.empty() && weight.size() == columns.size(), "[", check.op(),
              "] weight must have a tensor for each of ", columns.size(), " out_features, got ",
              weight.size());
  TORCH_CHECK(weight[0].dim() == 2, "[", check.op(),
              "] weight[0] must have 2 dimensions, got shape ", weight[0].sym_sizes());
  const c10::SymInt inner = weight[0].sym_size(1);
  for (size_t i = 0; i < weight.size(); ++i) {
    check.spec(numbered("weight", i).c_str(), weight[i], {{columns[i], inner}, dtype});
  }
  return inner;
}

}  // namespace

// ---- checks

TensorSpec packed_linear_output(const Checks& check, const Tensor& input, const Tensors& weight,
                                const Tensors& bias, at::IntArrayRef columns) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  const auto dtype = input.scalar_type();
  const c10::SymInt inner = check_weights(check, weight, columns, dtype);
  TORCH_CHECK(input.sym_size(-1) == inner, "[", check.op(), "] input must have last dimension ",
              inner, ", got shape ", input.sym_sizes());
  TORCH_CHECK(bias.empty() || bias.size() == columns.size(), "[", check.op(),
              "] bias must have a tensor for each of ", columns.size(), " out_features, got ",
              bias.size());
  for (size_t i = 0; i < bias.size(); ++i) {
    check.spec(numbered("bias", i).c_str(), bias[i], {{columns[i]}, dtype});
  }
  TensorSpec output = like(input);
  output.sizes.back() = total(columns);
  return output;
}

TensorSpecs packed_linear_backward_outputs(const Checks& check, const Tensor& grad_output,
                                           const Tensor* input, const Tensors& weight,
                                           at::IntArrayRef columns, PackedMask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const auto dtype = grad_output.scalar_type();
  check.compute_dtype("grad_output", grad_output);
  check.has_rows("grad_output", grad_output);
  TORCH_CHECK(grad_output.sym_size(-1) == total(columns), "[", check.op(),
              "] grad_output must have last dimension ", total(columns), ", got shape ",
              grad_output.sym_sizes());
  const TensorSpec none = absent(dtype), no_list = list_of({});
  TensorSpecs specs = {none, no_list, no_list};
  if (wants_input) {
    specs[0] = like(grad_output);
    specs[0].sizes.back() = check_weights(check, weight, columns, dtype);
  }
  if (wants_weight) {
    TORCH_CHECK(input != nullptr, "[", check.op(),
                "] input must be given for grad_weight, got none");
    check.has_rows("input", *input);
    TensorSpec as_input = like(grad_output);
    as_input.sizes.back() = wants_input ? specs[0].sizes.back() : input->sym_size(-1);
    check.spec("input", *input, as_input);
    std::vector<TensorSpec> list;
    for (const int64_t rows : columns) list.push_back({{rows, as_input.sizes.back()}, dtype});
    specs[1] = list_of(std::move(list));
  }
  if (wants_bias) {
    std::vector<TensorSpec> list;
    for (const int64_t size : columns) list.push_back({{size}, dtype});
    specs[2] = list_of(std::move(list));
  }
  return specs;
}

Tensor joined(const Tensors& tensors) {
  const Tensor& first = tensors[0];
  int64_t rows = 0, next = first.storage_offset();
  for (const Tensor& tensor : tensors) {
    const bool follows = tensor.is_contiguous() && tensor.storage_offset() == next &&
                         tensor.storage().is_alias_of(first.storage());
    if (!follows) return {};
    rows += tensor.size(0);
    next += tensor.numel();
  }
  if (tensors.size() == 1) return first;
  c10::DimVector sizes(first.sizes());
  sizes[0] = rows;
  return at::native::as_strided_tensorimpl(first, sizes, first.strides(), first.storage_offset());
}

Tensors runs_of(const Tensor& whole, at::IntArrayRef counts) {
  Tensors runs;
  const int64_t bytes = whole.numel() == 0 ? 0 : whole.stride(0) * whole.element_size();
  auto* const data = static_cast<char*>(whole.mutable_data_ptr());
  for_each_part(counts, [&](size_t i, int64_t first) {
    c10::DimVector sizes(whole.sizes());
    sizes[0] = counts[i];
    runs.push_back(at::from_blob(
        data + first * bytes, sizes, [whole](void*) {}, whole.options()));
  });
  return runs;
}

// ---- CPU

Tensor packed_linear_cpu(const Tensor& input, const Tensors& weight, const Tensors& bias,
                         at::IntArrayRef columns) {
  const Tensor x = as_matrix(input), whole = joined(weight);
  const int64_t width = total(columns);
  const Tensor output = bias.empty() ? empty_cpu({x.size(0), width}, x.scalar_type())
                                     : repeat_rows_cpu(bias_of_all(bias), x.size(0));
  const double beta = bias.empty() ? 0 : 1;
  if (whole.defined()) {
    multiply_cpu(output, x, transposed(whole), beta);
  } else {
    for_each_part(columns, [&](size_t i, int64_t first) {
      multiply_cpu(columns_of(output, first, columns[i]), x, transposed(weight[i]), beta);
    });
  }
  return with_last_size(output, input, width);
}

namespace {

Tensor input_gradient_cpu(const Tensor& grad, const Tensors& weight, at::IntArrayRef columns) {
  const Tensor whole = joined(weight);
  const Tensor result = empty_cpu({grad.size(0), weight[0].size(1)}, grad.scalar_type());
  if (whole.defined()) {
    multiply_cpu(result, grad, whole);
    return result;
  }
  const int64_t rows = grad.size(0);
  // This number of rows of the sum stays in a cache until the next weight adds to it (0.95 to 1.01
  // of the time). A widened product would widen the weights again for each part.
  constexpr int64_t kRows = 512;
  const int64_t unit = is_widened(grad, weight[0]) ? std::max<int64_t>(1, rows) : kRows;
  for (int64_t row = 0; row < rows; row += unit) {
    const int64_t count = std::min(unit, rows - row);
    const Tensor part = rows_of(result, row, count), left = rows_of(grad, row, count);
    for_each_part(columns, [&](size_t i, int64_t first) {
      multiply_cpu(part, columns_of(left, first, columns[i]), weight[i], i == 0 ? 0 : 1);
    });
  }
  return result;
}

Tensors weight_gradients_cpu(const Tensor& grad, const Tensor& input, at::IntArrayRef columns,
                             const MainGrad& main_grad) {
  const Tensors& buffers = main_grad.buffers;
  if (buffers.empty()) {
    const Tensor all = empty_cpu({grad.size(1), input.size(1)}, grad.scalar_type());
    multiply_cpu(all, transposed(grad), input);
    return runs_of(all, columns);
  }
  if (const Tensor all = joined(buffers); all.defined()) {
    product_cpu(all, transposed(grad), input, main_grad.adds);
    return buffers;
  }
  for_each_part(columns, [&](size_t i, int64_t first) {
    product_cpu(buffers[i], transposed(columns_of(grad, first, columns[i])), input, main_grad.adds);
  });
  return buffers;
}

}  // namespace

PackedBackward packed_linear_backward_cpu(const Tensor& grad_output, std::optional<Tensor> input,
                                          const Tensors& weight, at::IntArrayRef columns,
                                          PackedMask wanted, const MainGrad& main_grad) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Tensor grad = as_matrix(grad_output);
  const auto dtype = grad.scalar_type();
  PackedBackward found;
  auto& [grad_input, grad_weight, grad_bias] = found;
  if (wants_weight) {
    Tensor x = as_matrix(*input);
    input.reset();
    grad_weight = weight_gradients_cpu(grad, x, columns, main_grad);
  }
  if (wants_bias) {
    Tensor all = empty_cpu({grad.size(1)}, dtype);
    sum_columns_cpu(contiguous(grad), all);
    grad_bias = runs_of(all, columns);
  }
  grad_input = wants_input ? with_last_size(input_gradient_cpu(grad, weight, columns), grad_output,
                                            weight[0].size(1))
                           : empty_cpu({0}, dtype);
  return found;
}

// ---- CUDA

Tensor packed_linear_cuda(const Tensor& input, const Tensors& weight, const Tensors& bias,
                          at::IntArrayRef columns) {
  if (const Tensor whole = joined(weight); whole.defined()) {
    return linear_cuda(input, whole, bias.empty() ? Tensor() : bias_of_all(bias));
  }
  c10::DimVector sizes(input.sizes());
  sizes.back() = total(columns);
  Tensor output = empty(sizes, input.scalar_type(), input.device());
  const Tensor x = as_matrix(input), y = output.view({x.size(0), sizes.back()});
  for_each_part(columns, [&](size_t i, int64_t first) {
    linear_into_cuda(x, weight[i], bias.empty() ? Tensor() : bias[i],
                     columns_of(y, first, columns[i]));
  });
  return output;
}

PackedBackward packed_linear_backward_cuda(const Tensor& grad_output, std::optional<Tensor> input,
                                           const Tensors& weight, at::IntArrayRef columns,
                                           PackedMask wanted, const MainGrad& main_grad) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  const Tensor grad = as_matrix(grad_output);
  const auto dtype = grad.scalar_type();
  const auto device = grad.device();
  Tensor grad_input;
  Tensors grad_weight, grad_bias;
  if (wants_weight) {
    Tensor x = as_matrix(*input);
    input.reset();
    const Tensors& buffers = main_grad.buffers;
    for_each_part(columns, [&](size_t i, int64_t first) {
      const Tensor found =
          buffers.empty() ? empty({columns[i], x.size(1)}, dtype, device) : buffers[i];
      linear_weight_gradient_cuda(columns_of(grad, first, columns[i]), x, found,
                                  {.adds = main_grad.adds});
      grad_weight.push_back(found);
    });
  }
  if (wants_bias) {
    const Tensor all = empty({grad.size(1)}, dtype, device);
    sum_columns_cuda(contiguous(grad), all);
    for_each_part(columns, [&](size_t i, int64_t first) {
      grad_bias.push_back(all.narrow(0, first, columns[i]).clone());
    });
  }
  if (!wants_input) {
    grad_input = empty({0}, dtype, device);
  } else if (const Tensor whole = joined(weight); whole.defined()) {
    grad_input = linear_input_gradient_cuda(grad_output, whole);
  } else {
    for_each_part(columns, [&](size_t i, int64_t first) {
      grad_input = std::get<0>(linear_backward_cuda(columns_of(grad, first, columns[i]), {},
                                                    weight[i], {.residual = grad_input}));
    });
    grad_input = with_last_size(grad_input, grad_output, weight[0].size(1));
  }
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
}

// ---- decompositions

Tensor packed_linear_decomposed(const Tensor& input, const Tensors& weight, const Tensors& bias) {
  Tensors parts;
  for (size_t i = 0; i < weight.size(); ++i) {
    parts.push_back(bias.empty() ? at::linear(input, weight[i])
                                 : at::linear(input, weight[i], bias[i]));
  }
  return at::cat(parts, -1);
}

PackedBackward packed_linear_backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                                 const Tensors& weight, at::IntArrayRef columns,
                                                 PackedMask wanted) {
  const auto [wants_input, wants_weight, wants_bias] = wanted;
  Tensor grad_input;
  Tensors grad_weight, grad_bias;
  const Tensor x = wants_weight ? as_matrix(*input) : Tensor();
  const auto add_part = [&, wants_input = wants_input, wants_weight = wants_weight,
                         wants_bias = wants_bias](size_t i, int64_t first) {
    const Tensor grad = grad_output.narrow(-1, first, columns[i]);
    if (wants_input) {
      const Tensor part = at::matmul(grad, weight[i]);
      grad_input = grad_input.defined() ? grad_input + part : part;
    }
    if (wants_weight) grad_weight.push_back(as_matrix(grad).t().mm(x));
    if (wants_bias) grad_bias.push_back(sum_of_rows(grad));
  };
  for_each_part(columns, add_part);
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
}

}  // namespace transformer_ops
