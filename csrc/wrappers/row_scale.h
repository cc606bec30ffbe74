// Code shared by LayerScale, DropPath and the fused ops that contain one. Rows are multiplied by a
// vector, and by a number for each sample (the first dimension). A null gamma and undefined factors
// count as one.
#pragma once

#include "op/typed_op.h"

namespace transformer_ops {

// gamma must have one number for each element of the last dimension.
void check_gamma(const Checks& check, const Tensor& input, const Tensor* gamma);

// A number of the compute type for each sample. Raises if there is no dimension of samples.
TensorSpec sample_factors(const Checks& check, const Tensor& input);

// Draws 1 / (1 - p) or zero for each sample.
void draw_factors_cpu(double p, Tensor& factors);
void draw_factors_cuda(double p, Tensor& factors);
Tensor draw_factors_decomposed(const Tensor& input, double p);

// output = input gamma factors + extra, which may be null.
void scale_rows_cpu(const Tensor& input, const Tensor* gamma, const Tensor& factors,
                    const Tensor* extra, Tensor& output);
void scale_rows_cuda(const Tensor& input, const Tensor* gamma, const Tensor& factors,
                     const Tensor* extra, Tensor& output);
Tensor scale_rows_decomposed(const Tensor& input, const Tensor* gamma, const Tensor& factors);

// The wanted results among (grad_input, grad_gamma); input is null if grad_gamma is not wanted.
using ScaleMask = std::array<bool, 2>;
TensorSpecs scale_backward_shape(const Checks& check, const Tensor& grad_output,
                                 const Tensor* input, const Tensor* gamma, ScaleMask wanted);
void scale_backward_cpu(const Tensor& grad_output, const Tensor* input, const Tensor* gamma,
                        const Tensor& factors, ScaleMask wanted, Tensor& grad_input,
                        Tensor& grad_gamma);
void scale_backward_cuda(const Tensor& grad_output, const Tensor* input, const Tensor* gamma,
                         const Tensor& factors, ScaleMask wanted, Tensor& grad_input,
                         Tensor& grad_gamma);
std::tuple<Tensor, Tensor> scale_backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                                     const Tensor* gamma, const Tensor& factors,
                                                     ScaleMask wanted);

}  // namespace transformer_ops
