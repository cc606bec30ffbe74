// The bias and its gradient; the latter also in one pass with the gradient of the op after the
// bias.
#pragma once

#include "kernels/cpu.h"
#include "kernels/cuda.h"

namespace transformer_ops::cpu {

// bias and sums are acc arrays of h. The kernels add to the column sums, and sum values before they
// are rounded.

inline const Kernel<void(DType, const void* x, void* out, int64_t rows, int64_t h)> column_sum{
    "column_sum"};

inline const Kernel<void(DType, const void* x, const void* bias, void* y, int64_t rows, int64_t h)>
    bias_add{"bias_add"};

inline const Kernel<void(Activation, DType, const void* grad_y, const void* x, void* grad_x,
                         void* grad_bias, int64_t rows, int64_t h)>
    activation_bias_backward{"activation_bias_backward"};

// first_element is the bit index of the first element in the mask; it may be any number.
inline const Kernel<void(DType, const void* grad_y, const uint8_t* mask, int64_t first_element,
                         void* grad_x, void* grad_bias, int64_t rows, int64_t h)>
    relu_bias_backward{"relu_bias_backward"};

inline const Kernel<void(DType, const void* grad_y, const uint8_t* mask, int64_t first_element,
                         double p, void* grad_x, void* grad_bias, int64_t rows, int64_t h)>
    dropout_bias_backward{"dropout_bias_backward"};

// x and grad_x are rows x 2h, grad_bias has 2h.
inline const Kernel<void(const Glu&, DType, const void* grad_y, const void* x, void* grad_x,
                         void* grad_bias, int64_t rows, int64_t h)>
    glu_bias_backward{"glu_bias_backward"};

}  // namespace transformer_ops::cpu

namespace transformer_ops::cuda {

// The sums over rows, in two deterministic stages: within parts of the rows, then over the parts.
struct ColumnSum {
  Gradient out;
  void* partials;  // acc [parts, h] with h the width of what is summed
  int64_t parts;   // from column_sum_parts
};

inline const Kernel<void(Stream, DType, const void* x, const Vector& bias, void* y, int64_t rows,
                         int64_t h)>
    bias_add{"bias_add"};

inline const Kernel<void(Stream, DType, const void* x, const ColumnSum&, int64_t rows, int64_t h)>
    column_sum{"column_sum"};

inline const Kernel<void(Stream, Activation, DType, const void* grad_y, const void* x, void* grad_x,
                         const ColumnSum&, int64_t rows, int64_t h)>
    activation_bias_backward{"activation_bias_backward"};

inline const Kernel<void(Stream, DType, const void* grad_y, const uint8_t* mask, void* grad_x,
                         const ColumnSum&, int64_t rows, int64_t h)>
    relu_bias_backward{"relu_bias_backward"};

inline const Kernel<void(Stream, DType, const void* grad_y, const uint8_t* mask, double p,
                         void* grad_x, const ColumnSum&, int64_t rows, int64_t h)>
    dropout_bias_backward{"dropout_bias_backward"};

// grad_y is rows x h; grad_x and the sums are 2h wide.
inline const Kernel<void(Stream, const Glu&, DType, const void* grad_y, const void* x, void* grad_x,
                         const ColumnSum&, int64_t rows, int64_t h)>
    glu_bias_backward{"glu_bias_backward"};

inline const Kernel<int64_t(int64_t rows, int64_t h)> column_sum_parts{"column_sum_parts"};

}  // namespace transformer_ops::cuda
