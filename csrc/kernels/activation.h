// Activations.
#pragma once

#include "kernels/cpu.h"
#include "kernels/cuda.h"

namespace transformer_ops::cpu {

inline const Kernel<void(Activation, DType, const void* x, void* y, int64_t n)> activation_forward{
    "activation_forward"};

inline const Kernel<void(Activation, DType, const void* grad_y, const void* x, void* grad_x,
                         int64_t n)>
    activation_backward{"activation_backward"};

// For ReLU and SReLU only: computes the gradient from the output.
inline const Kernel<void(Activation, DType, const void* grad_y, const void* y, void* grad_x,
                         int64_t n)>
    activation_backward_from_output{"activation_backward_from_output"};

// Bit i % 8 of mask[i / 8] says whether the gradient passes: !(x[i] <= 0), so that NaN passes, as
// in torch. A range starts at a multiple of 8 elements; the last byte is padded with zeros.
inline const Kernel<void(DType, const void* x, void* y, uint8_t* mask, int64_t n)> relu_forward{
    "relu_forward"};

inline const Kernel<void(DType, const void* grad_y, const uint8_t* mask, void* grad_x, int64_t n)>
    relu_backward{"relu_backward"};

// Computes the gradient and recomputes the value, for a product whose backward needs both. `buffer`
// (rows x n) holds grad_y and receives y. Rows of x and grad_x are `stride` apart. The column sums
// of grad_x are added to grad_bias, unless that is null.
inline const Kernel<void(Activation, DType, void* buffer, const void* x, void* grad_x,
                         void* grad_bias, int64_t rows, int64_t n, int64_t stride)>
    activation_value_and_backward{"activation_value_and_backward"};

}  // namespace transformer_ops::cpu

namespace transformer_ops::cuda {

inline const Kernel<void(Stream, Activation, DType, const void* x, void* y, int64_t n)>
    activation_forward{"activation_forward"};

inline const Kernel<void(Stream, Activation, DType, const void* grad_y, const void* x, void* grad_x,
                         int64_t n)>
    activation_backward{"activation_backward"};

// For ReLU and SReLU only.
inline const Kernel<void(Stream, Activation, DType, const void* grad_y, const void* y, void* grad_x,
                         int64_t n)>
    activation_backward_from_output{"activation_backward_from_output"};

// Bit i % 8 of mask[i / 8]: !(x[i] <= 0). A null mask is not written.
inline const Kernel<void(Stream, DType, const void* x, void* y, uint8_t* mask, int64_t n)>
    relu_forward{"relu_forward"};

inline const Kernel<void(Stream, DType, const void* grad_y, const uint8_t* mask, void* grad_x,
                         int64_t n)>
    relu_backward{"relu_backward"};

}  // namespace transformer_ops::cuda
