// Activations whose rows are scaled, as those of experts are: y is scales[row] act(x).
#pragma once

#include "kernels/cpu.h"

namespace transformer_ops::cpu {

// x is rows x 2h, y rows x h, scales acc. SwiGLU, SiTUGLU and ClampedSwiGLU only.
inline const Kernel<void(const Glu&, DType, const void* x, const void* scales, void* y,
                         int64_t rows, int64_t h)>
    scaled_glu_forward{"scaled_glu_forward"};

// grad_scales, acc, takes the sums over rows of grad_y act(x), and y the value again. Either may be
// null; y may be grad_y.
inline const Kernel<void(const Glu&, DType, const void* grad_y, const void* x, const void* scales,
                         void* grad_x, void* grad_scales, void* y, int64_t rows, int64_t h)>
    scaled_glu_backward{"scaled_glu_backward"};

// The same for SReLU: x is rows x h.
inline const Kernel<void(DType, const void* x, const void* scales, void* y, int64_t rows,
                         int64_t h)>
    scaled_srelu_forward{"scaled_srelu_forward"};

inline const Kernel<void(DType, const void* grad_y, const void* x, const void* scales, void* grad_x,
                         void* grad_scales, void* y, int64_t rows, int64_t h)>
    scaled_srelu_backward{"scaled_srelu_backward"};

}  // namespace transformer_ops::cpu
