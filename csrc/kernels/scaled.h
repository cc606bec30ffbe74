// Activations whose rows are scaled, such as those of experts: y is scales[row] act(x).
#pragma once

#include "kernels/cpu.h"

namespace transformer_ops::cpu {

// x is rows x 2h, y is rows x h, and scales are acc. For SwiGLU, SiTUGLU and ClampedSwiGLU only.
inline const Kernel<void(const Glu&, DType, const void* x, const void* scales, void* y,
                         int64_t rows, int64_t h)>
    scaled_glu_forward{"scaled_glu_forward"};

// grad_scales, acc, receives the row sums of grad_y act(x), and y the recomputed value. Either may
// be null; y may be grad_y.
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
