// Layers of experts: each group's rows go through a product, a scaled activation and a second
// product, in temporary memory of that group.
#pragma once

#include "fuser/rule.h"
#include "wrappers/grouped.h"
#include "wrappers/permute.h"
#include "wrappers/scaled.h"

namespace transformer_ops {

// The rows of groups, one group after another: a matrix, or rows gathered by position.
class GroupedRows {
 public:
  explicit GroupedRows(Tensor matrix) : matrix_(std::move(matrix)) {}
  GroupedRows(Tensor matrix, const Places& places, int64_t copies)
      : matrix_(std::move(matrix)), places_(&places), copies_(copies) {}

  int64_t width() const { return matrix_.size(1); }
  // The rows from `first` on, padded to `rounded` rows; those past `count` are zeros.
  Tensor padded(int64_t first, int64_t count, int64_t rounded) const;

 private:
  Tensor matrix_;
  const Places* places_ = nullptr;
  int64_t copies_ = 1;
};

// A tensor of `up` is [hidden, in], one of `down` is [out, activated].
struct Experts {
  Experts(const ScaledActivation& scaled, const Tensors& first, const Tensors& second)
      : activation(scaled), up(group_weights(first)), down(group_weights(second)) {}

  const ScaledActivation& activation;
  GroupTensors up;
  GroupTensors down;
};

// For joint rules: the reason why two products and the activation between them, at these positions
// of the match, cannot be one step, or none.
std::optional<std::string> why_not_experts(const Match& match, int up, int activation, int down);

// Raises if weights and activation do not fit rows of `width` numbers.
void check_experts(const Checks& check, const Experts& experts, const c10::SymInt& width,
                   at::ScalarType dtype);

// Computes output = scales act(rows up^T), and hidden = rows up^T unless that is undefined. Rows
// that are in no group are zeros. `scales` is a column in the accumulate dtype.
void scaled_product_cpu(const ScaledActivation& activation, const GroupTensors& up,
                        const Groups& groups, const GroupedRows& rows, const Tensor& scales,
                        const Tensor& hidden, const Tensor& output);

// The same for output = scales act(rows up^T) down^T.
void experts_forward_cpu(const Experts& experts, const Groups& groups, const GroupedRows& rows,
                         const Tensor& scales, const Tensor& hidden, const Tensor& output);

// The results of backward. `rows` is undefined if it is not wanted.
struct ExpertGradients {
  Tensor rows;
  GroupTensors up, down;
  Tensor scales;
};
// Temporary memory for weight gradients that are not wanted.
Tensors scratch_like(const Tensors& weights);
// The gradients of the scales are a column in the accumulate dtype.
void experts_backward_cpu(const Experts& experts, const Groups& groups,
                          const GroupedRows& grad_output, const GroupedRows& rows,
                          const Tensor& hidden, const Tensor& scales,
                          const ExpertGradients& gradients);

}  // namespace transformer_ops
