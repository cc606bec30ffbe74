#include "wrappers/experts.h"

#include <algorithm>

#include "wrappers/cpu.h"
#include "wrappers/linear.h"
#include "wrappers/linear_recomputed.h"
#include "wrappers/product.h"

namespace transformer_ops {
namespace {

// The multiplications for a row in the larger product. They decide whether threads inside of
// products pay, and whether rows are rounded up.
int64_t work_of(const Experts& experts) {
  return std::max(experts.up.size(0) * experts.up.size(1),
                  experts.down.size(0) * experts.down.size(1));
}

// The rows of a group after the first product: in `hidden`, or in temporary memory.
RoundedRows hidden_rows(const GroupTensors& up, const Groups& groups, int64_t group,
                        int64_t rounded, const GroupedRows& rows, const Tensor& hidden,
                        int64_t limit) {
  const int64_t first = groups.begin(group), count = groups.size(group);
  RoundedRows wide = hidden.defined()
                         ? RoundedRows(hidden, first, count, rounded, limit)
                         : RoundedRows(empty_cpu({rounded, up.size(0)}, up.scalar_type()));
  multiply_cpu(wide.matrix(), rows.padded(first, count, rounded), transposed(weight_of(up, group)));
  wide.finish();
  return wide;
}

}  // namespace

Tensor GroupedRows::padded(int64_t first, int64_t count, int64_t rounded) const {
  if (places_ == nullptr) return padded_rows_cpu(matrix_, first, count, rounded);
  const Tensor found = empty_cpu({rounded, width()}, matrix_.scalar_type());
  copy_rows_cpu(matrix_, *places_, copies_, first, rows_of(found, 0, count));
  rows_of(found, count, rounded - count).zero_();
  return found;
}

std::optional<std::string> why_not_experts(const Match& match, int up, int activation, int down) {
  if (!match.key().grad_enabled) return "no gradient is wanted";
  for (const int op : {up, down}) {
    if (match.analysis.has_parameter(match.places[op], "bias")) return "a product has a bias";
    if (!match.parameter_requires_grad(op, "weight")) return "a weight needs no gradient";
    if (declaration(match.kind(op)).state_of("weight", match.op(op).attributes) != nullptr) {
      return "a weight accumulates into main_grad";
    }
  }
  return why_not_recomputed(match, activation);
}

void check_experts(const Checks& check, const Experts& experts, const c10::SymInt& width,
                   at::ScalarType dtype) {
  const auto& [activation, up, down] = experts;
  check_group_columns(check, "up", up, width, dtype);
  const c10::SymInt hidden = up.sym_size(0);
  const TensorSpec activated = activated_output(check, "hidden", {{hidden}, dtype}, activation);
  check_group_columns(check, "down", down, activated.sizes[0], dtype);
  TORCH_CHECK(down.sym_count() == up.sym_count(), "[", check.op(), "] down must have ",
              up.sym_count(), " groups as up has, got ", down.sym_count());
}

Tensors scratch_like(const Tensors& weights) {
  Tensors scratch;
  for (const Tensor& weight : weights) {
    scratch.push_back(empty_cpu(weight.sizes(), weight.scalar_type()));
  }
  return scratch;
}

void scaled_product_cpu(const ScaledActivation& activation, const GroupTensors& up,
                        const Groups& groups, const GroupedRows& rows, const Tensor& scales,
                        const Tensor& hidden, const Tensor& output) {
  const int64_t work = up.size(0) * up.size(1);
  const auto run = [&](int64_t begin, int64_t end) {
    const int64_t limit = groups.end(end - 1);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = groups.begin(group), count = groups.size(group);
      if (count == 0) continue;
      const int64_t rounded = rounded_rows(count, work, up.scalar_type());
      const RoundedRows wide = hidden_rows(up, groups, group, rounded, rows, hidden, limit);
      scaled_rows_forward_cpu(activation, rows_of(wide.matrix(), 0, count),
                              rows_of(scales, first, count), rows_of(output, first, count));
    }
  };
  parallel_over_groups(groups, work, run);
  zero_rest_cpu(groups, output);
  if (hidden.defined()) zero_rest_cpu(groups, hidden);
}

void experts_forward_cpu(const Experts& experts, const Groups& groups, const GroupedRows& rows,
                         const Tensor& scales, const Tensor& hidden, const Tensor& output) {
  const ScaledActivation& activation = experts.activation;
  const GroupTensors &up = experts.up, &down = experts.down;
  const auto dtype = up.scalar_type();
  const int64_t work = work_of(experts);
  const auto run = [&](int64_t begin, int64_t end) {
    const int64_t limit = groups.end(end - 1);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = groups.begin(group), count = groups.size(group);
      if (count == 0) continue;
      const int64_t rounded = rounded_rows(count, work, dtype);
      const RoundedRows wide = hidden_rows(up, groups, group, rounded, rows, hidden, limit);
      const Tensor activated = empty_cpu({rounded, down.size(1)}, dtype);
      scaled_rows_forward_cpu(activation, rows_of(wide.matrix(), 0, count),
                              rows_of(scales, first, count), rows_of(activated, 0, count));
      rows_of(activated, count, rounded - count).zero_();
      const RoundedRows out(output, first, count, rounded, limit);
      multiply_cpu(out.matrix(), activated, transposed(weight_of(down, group)));
      out.finish();
    }
  };
  parallel_over_groups(groups, work, run);
  zero_rest_cpu(groups, output);
  if (hidden.defined()) zero_rest_cpu(groups, hidden);
}

void experts_backward_cpu(const Experts& experts, const Groups& groups,
                          const GroupedRows& grad_output, const GroupedRows& rows,
                          const Tensor& hidden, const Tensor& scales,
                          const ExpertGradients& gradients) {
  const ScaledActivation& activation = experts.activation;
  const GroupTensors &up = experts.up, &down = experts.down;
  const auto dtype = up.scalar_type();
  const int64_t work = work_of(experts);
  const auto run = [&](int64_t begin, int64_t end) {
    const int64_t limit = groups.end(end - 1);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = groups.begin(group), count = groups.size(group);
      const Tensor grad_up = weight_of(gradients.up, group);
      const Tensor grad_down = weight_of(gradients.down, group);
      if (count == 0) {
        grad_up.zero_();
        grad_down.zero_();
        continue;
      }
      const int64_t rounded = rounded_rows(count, work, dtype);
      const Tensor grad = grad_output.padded(first, count, rounded);
      // This holds the gradient of the activation's result first, then the activation's result.
      const Tensor activated = empty_cpu({rounded, down.size(1)}, dtype);
      multiply_cpu(activated, grad, weight_of(down, group));
      const Tensor grad_hidden = empty_cpu({rounded, up.size(0)}, dtype);
      rows_of(grad_hidden, count, rounded - count).zero_();
      scaled_value_and_backward_cpu(activation, rows_of(activated, 0, count),
                                    rows_of(hidden, first, count), rows_of(scales, first, count),
                                    rows_of(grad_hidden, 0, count),
                                    rows_of(gradients.scales, first, count));
      product_cpu(grad_down, transposed(grad), activated, /*adds=*/false);
      product_cpu(grad_up, transposed(grad_hidden), rows.padded(first, count, rounded),
                  /*adds=*/false);
      if (!gradients.rows.defined()) continue;
      const RoundedRows out(gradients.rows, first, count, rounded, limit);
      multiply_cpu(out.matrix(), grad_hidden, weight_of(up, group));
      out.finish();
    }
  };
  parallel_over_groups(groups, work, run);
  zero_rest_cpu(groups, gradients.scales);
  if (gradients.rows.defined()) zero_rest_cpu(groups, gradients.rows);
}

}  // namespace transformer_ops
