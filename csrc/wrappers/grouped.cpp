#include "wrappers/grouped.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstring>

#include "kernels/gemm.h"
#include "op/split.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/linear.h"
#include "wrappers/product.h"

namespace transformer_ops {
namespace {

// [groups, rows, 1]: does the row belong to the group?
Tensor members(const Tensor& splits, const c10::SymInt& rows) {
  const Tensor ends = splits.cumsum(0, at::kLong);
  const Tensor row = at::arange(at::Scalar(rows), ends.options());
  return ((row >= (ends - splits).unsqueeze(-1)) & (row < ends.unsqueeze(-1))).unsqueeze(-1);
}

Tensor where_member(const Tensor& is_member, const Tensor& rows) {
  return at::where(is_member, rows, at::zeros_like(rows));
}

// Is it a call with plain tensors, of which autograd records nothing?
bool is_body(const Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kTraced({DispatchKey::Python, DispatchKey::Functionalize,
                                         DispatchKey::FuncTorchBatched,
                                         DispatchKey::FuncTorchGradWrapper});
  const bool records =
      at::GradMode::is_enabled() && tensor.requires_grad() &&
      !c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
  return !records && !tensor.key_set().has_any(kTraced);
}

// torch's product of groups takes bfloat16, rows and columns of 16 bytes, and splits on the device.
bool has_grouped_product(const Tensor& rows, const c10::SymInt& columns) {
  constexpr int64_t kUnit = 8;
  const cuda::Backend* const backend = cuda::backend();
  return backend != nullptr && backend->device == rows.device().type() &&
         rows.scalar_type() == at::kBFloat16 && is_body(rows) && rows.size(0) > 0 &&
         rows.size(1) % kUnit == 0 && columns % kUnit == 0 && cuda::multiplies_groups();
}

// Consecutive groups of rows, without sizes on the host.
class GroupsOnDevice {
 public:
  GroupsOnDevice(const Tensor& splits, int64_t rows)
      : ends_(splits.cumsum(0, at::kLong)), offsets_(ends_.to(at::kInt)), rows_(rows) {}

  // left [rows, k] times right [groups, k, n]. Rows of no group are not set.
  Tensor product(const Tensor& left, const Tensor& right) const {
    return at::_grouped_mm(aligned(left), right, offsets_);
  }
  // [groups, m, n]: the sums of left^T right over the rows of each group.
  Tensor weight_gradient(const Tensor& left, const Tensor& right) const {
    return at::_grouped_mm(aligned(left).t(), aligned(right), offsets_);
  }
  // The row of `each`, [groups, n], that belongs to each row. It is any one for rows of no group.
  Tensor spread(const Tensor& each) const {
    const Tensor row = at::arange(rows_, ends_.options());
    const Tensor group = at::searchsorted(ends_, row, /*out_int32=*/false, /*right=*/true);
    return each.index_select(0, group.clamp_max(ends_.size(0) - 1));
  }
  // Sets rows of no group to zero.
  void zero_rest(const Tensor& matrix) const {
    cuda::zero_rows_from(cuda::stream_of(matrix), cuda::write(matrix),
                         ends_.const_data_ptr<int64_t>() + ends_.size(0) - 1, rows_,
                         matrix.size(1) * static_cast<int64_t>(matrix.element_size()));
  }

 private:
  static Tensor aligned(const Tensor& matrix) {
    const Tensor rows = contiguous(matrix);
    return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0 ? rows : rows.clone();
  }

  Tensor ends_, offsets_;
  int64_t rows_;
};

// All matrices in one tensor.
Tensor stacked(const GroupTensors& tensors) {
  return tensors.is_stack() ? contiguous(tensors.list()[0]) : at::stack(tensors.list());
}
Tensors unstacked(const Tensor& all, bool stays) {
  return stays ? Tensors{all} : Tensors(all.unbind(0));
}

Tensor grouped_linear_on_device(const Tensor& x, const Tensor& splits, const GroupTensors& weights,
                                const GroupTensors& biases, const Tensor* scales) {
  const GroupsOnDevice groups(splits, x.size(0));
  Tensor rows = groups.product(x, stacked(weights).transpose(1, 2));
  if (!biases.empty()) {
    Tensor added = groups.spread(stacked(biases));
    if (scales != nullptr) added = scales->reshape({-1, 1}) * added;
    rows = (rows + added).to(x.scalar_type());
  }
  groups.zero_rest(rows);
  return rows;
}

}  // namespace

Groups::Groups(const Checks& check, const Tensor& splits, int64_t rows) {
  const Tensor sizes = splits.to(at::kLong).contiguous();
  const std::span given(sizes.const_data_ptr<int64_t>(), static_cast<size_t>(sizes.numel()));
  ends_.reserve(given.size() + 1);
  ends_.push_back(0);
  for (const int64_t size : given) {
    TORCH_CHECK(size >= 0, "[", check.op(), "] splits must be at least 0, got ", size);
    TORCH_CHECK(size <= rows - ends_.back(), "[", check.op(), "] splits must add up to at most ",
                rows, " rows, got more: ", sizes);
    ends_.push_back(ends_.back() + size);
  }
}

void check_splits(const Checks& check, const Tensor& splits, const c10::SymInt& groups) {
  TORCH_CHECK(at::isIntegralType(splits.scalar_type(), /*includeBool=*/false), "[", check.op(),
              "] splits must hold integers, got ", splits.scalar_type());
  TORCH_CHECK(splits.dim() == 1 && splits.sym_size(0) == groups, "[", check.op(),
              "] splits must have shape [", groups, "], got ", splits.sym_sizes());
}

void check_rounded_groups(const Checks& check, const Tensors& input, const Tensor* splits) {
  const bool is_one = input.size() == 1;
  TORCH_CHECK(splits == nullptr || is_one, "[", check.op(),
              "] input must be one tensor where there are splits, got ", input.size());
  for (const Tensor& tensor : input) {
    check.compute_dtype("input", tensor);
    check.has_rows("input", tensor);
    TORCH_CHECK(splits != nullptr || tensor.dim() == 2 || (is_one && tensor.dim() == 3), "[",
                check.op(), "] input must have ", is_one ? "2 or 3" : "2",
                " dimensions where there are no splits, got shape ", tensor.sym_sizes());
    TORCH_CHECK(tensor.scalar_type() == input[0].scalar_type(), "[", check.op(),
                "] input must be of one dtype, got ", input[0].scalar_type(), " and ",
                tensor.scalar_type());
  }
  if (splits != nullptr) check_splits(check, *splits, splits->dim() > 0 ? splits->sym_size(0) : 0);
}

namespace {

// Is it a single tensor with a matrix for each group, without splits?
bool is_stack(const Tensors& input) { return input.size() == 1 && input[0].dim() == 3; }

}  // namespace

c10::SymInt count_rounded_groups(const Tensors& input, const Tensor* splits) {
  if (splits != nullptr) return splits->sym_size(0);
  return is_stack(input) ? input[0].sym_size(0) : c10::SymInt(std::ssize(input));
}

RoundedGroups rounded_groups(const Checks& check, const Tensors& input, const Tensor* splits) {
  if (splits == nullptr) return {is_stack(input) ? input[0].unbind(0) : input, Tensor()};
  const Tensor rows = as_matrix(input[0]);
  const Groups groups(check, *splits, rows.size(0));
  RoundedGroups found;
  for (int64_t group = 0; group < groups.count(); ++group) {
    found.matrices.push_back(rows.narrow(0, groups.begin(group), groups.size(group)));
  }
  found.rest = rows.narrow(0, groups.rows(), rows.size(0) - groups.rows());
  return found;
}

c10::SymInt GroupTensors::sym_count() const {
  return is_stack_ ? first().sym_size(0) : c10::SymInt(std::ssize(*list_));
}

int64_t GroupTensors::count() const { return is_stack_ ? first().size(0) : std::ssize(*list_); }

Tensor GroupTensors::operator[](int64_t group) const {
  return is_stack_ ? first().select(0, group) : (*list_)[group];
}

void GroupTensors::check(const Checks& check, const char* name, const c10::SymInt& groups,
                         const TensorSpec& of_one) const {
  if (empty()) return;
  if (is_stack_) {
    TensorSpec whole{{groups}, of_one.dtype};
    whole.sizes.append(of_one.sizes.begin(), of_one.sizes.end());
    return check.spec(name, first(), whole);
  }
  TORCH_CHECK(groups == std::ssize(*list_), "[", check.op(), "] ", name,
              " must have a tensor for each of ", groups, " groups, got ", list_->size());
  for (const Tensor& tensor : *list_) check.spec(name, tensor, of_one);
}

void check_group_weights(const Checks& check, const char* name, const GroupTensors& weights) {
  TORCH_CHECK(!weights.empty(), "[", check.op(), "] ", name, " must be given, got an empty list");
  const Tensor& first = weights.list()[0];
  TORCH_CHECK(weights.is_stack() || first.dim() == 2, "[", check.op(), "] ", name,
              weights.list().size() == 1
                  ? " must have 3 dimensions, got shape "
                  : " must be one tensor of 3 dimensions or matrices, got shape ",
              first.sym_sizes());
  weights.check(check, name, weights.sym_count(),
                {{weights.sym_size(0), weights.sym_size(1)}, weights.scalar_type()});
}

void check_group_columns(const Checks& check, const char* name, const GroupTensors& weights,
                         const c10::SymInt& columns, at::ScalarType dtype) {
  check_group_weights(check, name, weights);
  TORCH_CHECK(weights.sym_size(1) == columns, "[", check.op(), "] ", name, " must have shape ",
              weights.is_stack() ? "[*, *, " : "[*, ", columns, "], got ",
              weights.list()[0].sym_sizes());
  weights.check(check, name, weights.sym_count(), {{weights.sym_size(0), columns}, dtype});
}

Tensor weight_of(const GroupTensors& weights, int64_t group) {
  return weights.is_stack() ? matrix_of(weights.list()[0], group) : weights.list()[group];
}

TensorSpec group_gradients(const c10::SymInt& groups, const TensorSpec& of_one, bool is_stack) {
  if (is_stack) {
    TensorSpec whole{{groups}, of_one.dtype};
    whole.sizes.append(of_one.sizes.begin(), of_one.sizes.end());
    return list_of({whole});
  }
  return list_of(std::vector<TensorSpec>(groups.guard_int(__FILE__, __LINE__), of_one));
}

TensorSpec grouped_linear_output(const Checks& check, const Tensor& input, const Tensor& splits,
                                 const GroupTensors& weight) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  check_group_weights(check, "weight", weight);
  TORCH_CHECK(input.sym_size(-1) == weight.sym_size(1), "[", check.op(),
              "] input must have last dimension ", weight.sym_size(1), ", got shape ",
              input.sym_sizes());
  TORCH_CHECK(input.scalar_type() == weight.scalar_type(), "[", check.op(),
              "] input must have the weight's dtype ", weight.scalar_type(), ", got ",
              input.scalar_type());
  check_splits(check, splits, weight.sym_count());
  TensorSpec output = like(input);
  output.sizes.back() = weight.sym_size(0);
  return output;
}

TensorSpec grouped_linear_output(const Checks& check, const Tensor& input, const Tensor& splits,
                                 const GroupTensors& weight, const GroupTensors& bias,
                                 const Tensor* scales) {
  TensorSpec output = grouped_linear_output(check, input, splits, weight);
  bias.check(check, "bias", weight.sym_count(), {{weight.sym_size(0)}, weight.scalar_type()});
  if (scales != nullptr) {
    TORCH_CHECK(!bias.empty(), "[", check.op(), "] scales must come with a bias, got none");
    check.compute_dtype("scales", *scales);
    const auto rows = input.sym_sizes().slice(0, input.dim() - 1);
    TORCH_CHECK(scales->sym_sizes().equals(rows), "[", check.op(),
                "] scales must have a number for each row, shape ", rows, ", got ",
                scales->sym_sizes());
  }
  return output;
}

int64_t rounded_rows(int64_t count, int64_t work, at::ScalarType dtype) {
  constexpr int64_t kUnit = 16;
  // Up to 16 rows, one kernel for each number of rows costs less than twice the work for each row.
  if (count <= kUnit || !may_compile_kernel(dtype, count * work)) return count;
  return (count + kUnit - 1) / kUnit * kUnit;
}

Tensor padded_rows_cpu(const Tensor& matrix, int64_t first, int64_t count, int64_t rounded) {
  const Tensor rows = rows_of(matrix, first, count);
  if (rounded == count) return rows;
  const Tensor padded = empty_cpu({rounded, matrix.size(1)}, matrix.scalar_type());
  auto* const to = static_cast<char*>(padded.mutable_data_ptr());
  const size_t bytes = rows.nbytes();
  if (bytes > 0) std::memcpy(to, rows.const_data_ptr(), bytes);
  std::memset(to + bytes, 0, padded.nbytes() - bytes);
  return padded;
}

RoundedRows::RoundedRows(const Tensor& out, int64_t first, int64_t count, int64_t rounded,
                         int64_t limit) {
  if (first + rounded <= limit) {
    matrix_ = rows_of(out, first, rounded);
    return;
  }
  own_ = rows_of(out, first, count);
  matrix_ = rounded == count ? own_ : empty_cpu({rounded, out.size(1)}, out.scalar_type());
}

void RoundedRows::finish() const {
  if (!own_.defined() || own_.is_same(matrix_)) return;
  std::memcpy(own_.mutable_data_ptr(), matrix_.const_data_ptr(), own_.nbytes());
}

void grouped_product_cpu(const Groups& groups, const Tensor& out, const Tensor& left,
                         const GroupTensors& weights, bool transposes) {
  const auto dtype = left.scalar_type();
  const int64_t work = weights.size(0) * weights.size(1);
  const auto multiply = [&](int64_t first_group, int64_t last_group) {
    const int64_t limit = groups.end(last_group - 1);
    for (int64_t group = first_group; group < last_group; ++group) {
      const int64_t count = groups.size(group), first = groups.begin(group);
      if (count == 0) continue;
      const int64_t rounded = rounded_rows(count, work, dtype);
      const Tensor weight = weight_of(weights, group);
      const RoundedRows product(out, first, count, rounded, limit);
      // The next groups of this thread write their rows later.
      multiply_cpu(product.matrix(),
                   first + rounded <= limit ? rows_of(left, first, rounded)
                                            : padded_rows_cpu(left, first, count, rounded),
                   transposes ? transposed(weight) : weight);
      product.finish();
    }
  };
  parallel_over_groups(groups, work, multiply);
}

void grouped_weight_gradient_cpu(const Groups& groups, const GroupTensors& out, const Tensor& left,
                                 const Tensor& right, bool adds) {
  const int64_t work = out.size(0) * out.size(1);
  const auto multiply = [&](int64_t first_group, int64_t last_group) {
    for (int64_t group = first_group; group < last_group; ++group) {
      const int64_t count = groups.size(group), first = groups.begin(group);
      const Tensor result = weight_of(out, group);
      if (count == 0) {
        if (!adds) result.zero_();
        continue;
      }
      const int64_t rounded = rounded_rows(count, work, left.scalar_type());
      product_cpu(result, transposed(padded_rows_cpu(left, first, count, rounded)),
                  padded_rows_cpu(right, first, count, rounded), adds);
    }
  };
  parallel_over_groups(groups, work, multiply);
}

void parallel_over_groups(const Groups& groups, int64_t work,
                          c10::function_ref<void(int64_t, int64_t)> function) {
  if (groups.count() == 0) return;
  int64_t active = 0;
  for (int64_t group = 0; group < groups.count(); ++group) active += groups.size(group) > 0;
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const bool in_parallel = cpu::groups_side_by_side(active, groups.rows(), work, threads);
  if (!in_parallel) return function(0, groups.count());
  // The ranges have about the same number of rows.
  std::vector<int64_t> bounds = {0};
  for (int64_t thread = 1; thread < threads; ++thread) {
    int64_t group = bounds.back();
    const int64_t rows = groups.rows() * thread / threads;
    // A range ends at the nearer end of a group.
    while (group < groups.count() && groups.begin(group) + groups.end(group) <= 2 * rows) ++group;
    bounds.push_back(group);
  }
  bounds.push_back(groups.count());
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      if (bounds[thread] < bounds[thread + 1]) function(bounds[thread], bounds[thread + 1]);
    }
  });
}

void zero_rest_cpu(const Groups& groups, const Tensor& matrix) {
  const int64_t count = matrix.size(0) - groups.rows();
  if (count > 0) rows_of(matrix, groups.rows(), count).zero_();
}

Tensor grouped_linear_decomposed(const Tensor& input, const Tensor& splits, const Tensors& weight,
                                 const Tensors& bias, const Tensor* scales) {
  const GroupTensors weights = group_weights(weight), biases = group_biases(bias);
  const Tensor x = as_matrix(input);
  c10::SymDimVector sizes(input.sym_sizes());
  sizes.back() = weights.sym_size(0);
  if (has_grouped_product(x, weights.sym_size(0))) {
    return grouped_linear_on_device(x, splits, weights, biases, scales).reshape_symint(sizes);
  }
  const Tensor is_member = members(splits, x.sym_size(0));
  Tensor output;
  for (int64_t group = 0; group < weights.count(); ++group) {
    Tensor rows = x.matmul(weights[group].t());
    if (!biases.empty()) {
      Tensor added = biases[group];
      if (scales != nullptr) added = scales->reshape({-1, 1}) * added;
      rows = (rows + added).to(input.scalar_type());
    }
    rows = where_member(is_member.select(0, group), rows);
    output = output.defined() ? output + rows : rows;
  }
  return output.reshape_symint(sizes);
}

GroupedBackward grouped_linear_backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                                   const Tensor& splits, const Tensors& weight,
                                                   const Tensors& bias, const Tensor* scales,
                                                   GroupedLayout layout, GroupedMask wanted) {
  const auto [wants_input, wants_weight, wants_bias, wants_scales] = wanted;
  const GroupTensors weights = group_weights(weight), biases = group_biases(bias);
  const Tensor grad = as_matrix(grad_output);
  const Tensor is_member = members(splits, grad.sym_size(0));
  const Tensor x = wants_weight ? as_matrix(*input) : Tensor();
  const Tensor scaled = scales != nullptr && wants_bias ? grad * scales->reshape({-1, 1}) : grad;
  Tensor grad_input, grad_scales;
  Tensors grad_weights, grad_biases;
  const auto add = [](Tensor& sum, const Tensor& part) { sum = sum.defined() ? sum + part : part; };
  const c10::SymInt columns = wants_weight ? x.sym_size(1) : wants_input ? weights.sym_size(1) : 0;
  const bool is_grouped = has_grouped_product(grad, columns);
  if (is_grouped) {
    const GroupsOnDevice groups(splits, grad.size(0));
    if (wants_input) {
      grad_input = groups.product(grad, stacked(weights));
      groups.zero_rest(grad_input);
    }
    if (wants_weight) {
      grad_weights = unstacked(groups.weight_gradient(grad, x), layout.stacks_weight);
    }
    if (wants_bias && scales == nullptr) {
      // A column of the products with ones; eight are 16 bytes.
      const Tensor sums = groups.weight_gradient(grad, at::ones({grad.size(0), 8}, grad.options()));
      grad_biases = unstacked(sums.select(-1, 0), layout.stacks_bias);
    }
    if (wants_scales) {
      const Tensor sums = (grad * groups.spread(stacked(biases))).sum(-1);
      grad_scales = where_member(is_member.squeeze(-1).any(0), sums);
    }
  }
  const bool sums_bias = wants_bias && (!is_grouped || scales != nullptr);
  for (int64_t group = 0; sums_bias && group < splits.size(0); ++group) {
    const Tensor rows = where_member(is_member.select(0, group), scaled);
    grad_biases.push_back(rows.sum(0).to(grad.scalar_type()));
  }
  for (int64_t group = 0; !is_grouped && group < splits.size(0); ++group) {
    const Tensor is_own = is_member.select(0, group);
    if (wants_input) add(grad_input, where_member(is_own, grad.matmul(weights[group])));
    if (wants_weight) {
      grad_weights.push_back(where_member(is_own, grad).t().matmul(where_member(is_own, x)));
    }
    if (wants_scales) add(grad_scales, where_member(is_own, grad * biases[group]).sum(-1));
  }
  if (wants_input) {
    c10::SymDimVector sizes(grad_output.sym_sizes());
    sizes.back() = weights.sym_size(1);
    grad_input = grad_input.reshape_symint(sizes);
  }
  if (wants_scales) {
    grad_scales = grad_scales.reshape_symint(scales->sym_sizes()).to(scales->scalar_type());
  }
  if (wants_weight && layout.stacks_weight && !is_grouped) grad_weights = {at::stack(grad_weights)};
  if (sums_bias && layout.stacks_bias) grad_biases = {at::stack(grad_biases)};
  return {grad_input, grad_weights, grad_biases, grad_scales};
}

std::tuple<Tensor, Tensors> grouped_product_backward_decomposed(const Tensor& grad_output,
                                                                const Tensor& input,
                                                                const Tensor& splits,
                                                                const Tensors& weight,
                                                                std::array<bool, 2> wanted) {
  const GroupedLayout layout{.stacks_weight = group_weights(weight).is_stack()};
  const auto [grad_input, grad_weight, no_bias, no_scales] =
      grouped_linear_backward_decomposed(grad_output, &input, splits, weight, {}, nullptr, layout,
                                         {wanted[0], wanted[1], false, false});
  return {grad_input, grad_weight};
}

void take_gradients(const Tensors& results, const Tensors& found, bool adds) {
  for (size_t i = 0; i < found.size(); ++i) {
    adds ? results[i].add_(found[i]) : results[i].copy_(found[i]);
  }
}

}  // namespace transformer_ops
