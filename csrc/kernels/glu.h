// Gated linear units: x is rows x 2h, y is rows x h.
#pragma once

#include "kernels/cpu.h"
#include "kernels/cuda.h"

namespace transformer_ops::cpu {

inline const Kernel<void(const Glu&, DType, const void* x, void* y, int64_t rows, int64_t h)>
    glu_forward{"glu_forward"};

inline const Kernel<void(const Glu&, DType, const void* grad_y, const void* x, void* grad_x,
                         int64_t rows, int64_t h)>
    glu_backward{"glu_backward"};

// Computes y from x + bias; `kept` receives that sum, rounded. `kept` may be x, or null.
inline const Kernel<void(const Glu&, DType, const void* x, const void* bias, void* kept, void* y,
                         int64_t rows, int64_t h)>
    bias_glu_forward{"bias_glu_forward"};

// Computes the gradient and recomputes the value, as activation_value_and_backward does, for
// columns first to first + n of y, out of h. x and grad_x are rows x 2h. The size of interleaved
// blocks must divide first and n.
inline const Kernel<void(const Glu&, DType, void* buffer, const void* x, void* grad_x, int64_t rows,
                         int64_t n, int64_t h, int64_t first)>
    glu_value_and_backward{"glu_value_and_backward"};

}  // namespace transformer_ops::cpu

namespace transformer_ops::cuda {

inline const Kernel<void(Stream, const Glu&, DType, const void* x, void* y, int64_t rows,
                         int64_t h)>
    glu_forward{"glu_forward"};

inline const Kernel<void(Stream, const Glu&, DType, const void* grad_y, const void* x, void* grad_x,
                         int64_t rows, int64_t h)>
    glu_backward{"glu_backward"};

inline const Kernel<void(Stream, const Glu&, DType, const void* x, const Vector& bias, void* kept,
                         void* y, int64_t rows, int64_t h)>
    bias_glu_forward{"bias_glu_forward"};

}  // namespace transformer_ops::cuda
