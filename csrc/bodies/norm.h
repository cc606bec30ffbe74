// What the norms and the fused ops that contain one share.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "bodies/cuda.h"
#include "kernels/norm.h"
#include "op/typed_op.h"

namespace transformer_ops {

// ---- checks: a norm is over the trailing dimensions, which are those of its weight

void check_norm(const Checks& check, const Tensor& input, const Tensor& weight);
void check_layer_norm(const Checks& check, const Tensor& input, const Tensor& weight,
                      const Tensor& bias);
void check_rms_norm_backward(const Checks& check, const Tensor& grad_output, const Tensor& input,
                             const Tensor& rstd, const Tensor& weight);
void check_layer_norm_backward(const Checks& check, const Tensor& grad_output, const Tensor& input,
                               const Tensor& mean, const Tensor& rstd, const Tensor& weight);

// ---- meanings

Tensor layer_norm_unfused(const Tensor& input, const Tensor& weight, const Tensor& bias, double eps,
                          bool zero_centered_gamma);
// `eps`, or if there is none that of torch.nn.RMSNorm: the machine epsilon of the dtype in which
// the norm computes.
double rms_norm_eps(std::optional<double> eps, const Tensor& input);
Tensor rms_norm_unfused(const Tensor& input, const Tensor& weight, std::optional<double> eps,
                        bool zero_centered_gamma);
// The bias does not reach backward: its gradient does not depend on it.
std::tuple<Tensor, Tensor, Tensor> layer_norm_gradients(const Tensor& grad_output,
                                                        const Tensor& input, const Tensor& weight,
                                                        double eps, bool zero_centered_gamma);
std::tuple<Tensor, Tensor> rms_norm_gradients(const Tensor& grad_output, const Tensor& input,
                                              const Tensor& weight, std::optional<double> eps,
                                              bool zero_centered_gamma);

// ---- kernels

// What they add to the weight.
inline double gamma_offset(bool zero_centered_gamma) { return zero_centered_gamma ? 1.0 : 0.0; }

namespace cuda {

// RMSNorm; a LayerNorm has a beta and means beside it.
NormForward norm_of(Norm norm, const Tensor& input, const Tensor& weight, double eps,
                    bool zero_centered_gamma, const Tensor& output, const Tensor& rstd);
NormBackward norm_backward_of(Norm norm, const Tensor& grad_output, const Tensor& input,
                              const Tensor& rstd, const Tensor& weight, bool zero_centered_gamma,
                              const Tensor& grad_input);
// With memory for its sums over rows; `x` is the norm's input.
void run_norm_backward(const Tensor& x, NormBackward norm);

}  // namespace cuda

// ---- recomputing (op/recompute.h)

// What a norm's output follows from. Null where the norm has none.
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
Tensor normalize_unfused(const NormTensors& norm);

// The typed op that computes a norm's output again, from its statistics; `tensors` has the
// parameters of `schema`, of which `by_rows` have a row for each of the output.
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
  const auto unfused = [tensors](Parameters... parameters) {
    return normalize_unfused(tensors(parameters...));
  };
  return {.schema = schema,
          .shape = shape,
          .bodies = {cpu, cuda, unfused},
          .reads_first = false,
          .by_rows = std::move(by_rows)};
}

}  // namespace transformer_ops
