// Code shared by the norms and the fused ops that contain one.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/norm.h"
#include "op/typed_op.h"
#include "wrappers/cuda.h"

namespace transformer_ops {

// The sizes of the trailing dimensions that a norm normalizes over. A null weight or bias is
// absent.
using NormShape = std::vector<int64_t>;

// ---- checks

void check_norm(const Checks& check, const Tensor& input, const Tensor* weight, const Tensor* bias,
                const NormShape& shape, bool zero_centered_gamma);
// A null mean is absent.
void check_norm_backward(const Checks& check, const Tensor& grad_output, const Tensor& input,
                         const Tensor* mean, const Tensor& rstd, const Tensor* weight,
                         const NormShape& shape, bool wants_weight);
// The spec of a parameter. A bias has the dtype of the weight, or of the input if there is no
// weight.
TensorSpec norm_gradient(const Tensor& input, const Tensor* weight, const NormShape& shape,
                         bool wanted);

// ---- decompositions

Tensor layer_norm_decomposed(const Tensor& input, const Tensor* weight, const Tensor* bias,
                             const NormShape& shape, double eps, bool zero_centered_gamma);
// Returns `eps` or, if there is none, the default of torch.nn.RMSNorm: the machine epsilon of the
// dtype in which the norm computes.
double rms_norm_eps(std::optional<double> eps, const Tensor& input);
Tensor rms_norm_decomposed(const Tensor& input, const Tensor* weight, const NormShape& shape,
                           std::optional<double> eps, bool zero_centered_gamma);
// The flags of the wanted gradients. Backward does not get the bias, because its gradient does not
// depend on it.
using LayerNormMask = std::array<bool, 3>;
using RMSNormMask = std::array<bool, 2>;
std::tuple<Tensor, Tensor, Tensor> layer_norm_gradients(const Tensor& grad_output,
                                                        const Tensor& input, const Tensor* weight,
                                                        const NormShape& shape, double eps,
                                                        bool zero_centered_gamma,
                                                        LayerNormMask wanted);
std::tuple<Tensor, Tensor> rms_norm_gradients(const Tensor& grad_output, const Tensor& input,
                                              const Tensor* weight, const NormShape& shape,
                                              std::optional<double> eps, bool zero_centered_gamma,
                                              RMSNormMask wanted);

// ---- kernels

// The number of elements of a row.
int64_t norm_width(const NormShape& shape);
// The number that kernels add to the weight.
inline double gamma_offset(bool zero_centered_gamma) { return zero_centered_gamma ? 1.0 : 0.0; }

namespace cpu {

// The weight and the bias in the kernels' dtype; null if absent.
struct NormParameters {
  NormParameters(const Tensor& input, const Tensor* weight, const Tensor* bias,
                 bool zero_centered_gamma);

  const Tensor gamma_tensor, beta_tensor;
  const void *const gamma, *const beta;
};

}  // namespace cpu

namespace cuda {

// The arguments of RMSNorm; a LayerNorm also has means.
NormForward norm_of(Norm norm, const Tensor& input, const Tensor* weight, const Tensor* bias,
                    const NormShape& shape, double eps, bool zero_centered_gamma,
                    const Tensor& output, const Tensor& rstd);
NormBackward norm_backward_of(Norm norm, const Tensor& grad_output, const Tensor& input,
                              const Tensor& rstd, const Tensor* weight, const NormShape& shape,
                              bool zero_centered_gamma, const Tensor& grad_input);
Gradient gradient_if(bool wanted, const Tensor& gradient);
// Runs the backward, with memory for its sums over rows; `x` is the norm's input.
void run_norm_backward(const Tensor& x, NormBackward norm);

}  // namespace cuda

// ---- recomputation (op/recompute.h)

// The tensors from which a norm's output is recomputed. Tensors that the norm does not have are
// null.
struct NormTensors {
  const Tensor& input;
  const Tensor* mean;
  const Tensor& rstd;
  const Tensor* weight;
  const Tensor* bias;
  bool zero_centered_gamma = false;
};

TensorSpecs normalize_shape(const Checks& check, const NormTensors& norm);
void normalize_cpu(const NormTensors& norm, const Tensor& output);
void normalize_cuda(const NormTensors& norm, const Tensor& output);
Tensor normalize_decomposed(const NormTensors& norm);

// The typed op that recomputes a norm's output from its statistics. `tensors` has the parameters of
// `schema`; those in `by_rows` have a row for each row of the output.
template <typename... Parameters>
TypedOp recompute_norm(const std::string& schema, NormTensors (*tensors)(Parameters...),
                       std::vector<std::string> by_rows) {
  const auto shape = [tensors](const Checks& check, Parameters... parameters) {
    return normalize_shape(check, tensors(parameters...));
  };
  const auto cpu = [tensors](Parameters... parameters, Tensor& output) {
    normalize_cpu(tensors(parameters...), output);
  };
  const auto cuda = [tensors](Parameters... parameters, Tensor& output) {
    normalize_cuda(tensors(parameters...), output);
  };
  const auto decomposition = [tensors](Parameters... parameters) {
    return normalize_decomposed(tensors(parameters...));
  };
  return {.schema = schema,
          .shape = shape,
          .bodies = {cpu, cuda, decomposition},
          .reads_first = false,
          .by_rows = std::move(by_rows)};
}

}  // namespace transformer_ops
