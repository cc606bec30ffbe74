// Norms over rows of h.
#pragma once

#include "kernels/cpu.h"
#include "kernels/cuda.h"

namespace transformer_ops::cpu {

// gamma[h] and beta[h] may be null (absent). The kernels add to grad_gamma[h] and grad_beta[h],
// which may be null (not wanted). mean and rstd hold one number for each row.
inline const Kernel<void(DType, const void* x, const void* gamma, const void* beta, double eps,
                         void* y, void* mean, void* rstd, int64_t rows, int64_t h)>
    layer_norm_forward{"layer_norm_forward"};

inline const Kernel<void(DType, const void* grad_y, const void* x, const void* mean,
                         const void* rstd, const void* gamma, void* grad_x, void* grad_gamma,
                         void* grad_beta, int64_t rows, int64_t h)>
    layer_norm_backward{"layer_norm_backward"};

// grad_x = the same + residual; both are rows x h, of acc values if `wide`.
inline const Kernel<void(DType, bool wide, const void* grad_y, const void* x, const void* mean,
                         const void* rstd, const void* gamma, const void* residual, void* grad_x,
                         void* grad_gamma, void* grad_beta, int64_t rows, int64_t h)>
    layer_norm_residual_backward{"layer_norm_residual_backward"};

// rstd = 1 / sqrt(mean(x^2) + eps)
inline const Kernel<void(DType, const void* x, const void* gamma, double eps, void* y, void* rstd,
                         int64_t rows, int64_t h)>
    rms_norm_forward{"rms_norm_forward"};

inline const Kernel<void(DType, const void* grad_y, const void* x, const void* rstd,
                         const void* gamma, void* grad_x, void* grad_gamma, int64_t rows,
                         int64_t h)>
    rms_norm_backward{"rms_norm_backward"};

inline const Kernel<void(DType, bool wide, const void* grad_y, const void* x, const void* rstd,
                         const void* gamma, const void* residual, void* grad_x, void* grad_gamma,
                         int64_t rows, int64_t h)>
    rms_norm_residual_backward{"rms_norm_residual_backward"};

// rstd = 1 / sqrt(sum(x^2) + eps)
inline const Kernel<void(DType, const void* x, double eps, void* y, void* rstd, int64_t rows,
                         int64_t h)>
    l2_norm_forward{"l2_norm_forward"};

inline const Kernel<void(DType, const void* grad_y, const void* x, const void* rstd, void* grad_x,
                         int64_t rows, int64_t h)>
    l2_norm_backward{"l2_norm_backward"};

// y = (x - mean) rstd gamma + beta from the statistics of a norm; mean is null for the others
inline const Kernel<void(DType, const void* x, const void* mean, const void* rstd,
                         const void* gamma, const void* beta, void* y, int64_t rows, int64_t h)>
    normalize{"normalize"};

// sum = x + extra, and its norm as above. The norm is that of the rounded sum, so that later
// readers of the sum compute the same. A null sum is not written.
inline const Kernel<void(DType, const void* x, const void* extra, const void* gamma,
                         const void* beta, double eps, void* sum, void* y, void* mean, void* rstd,
                         int64_t rows, int64_t h)>
    add_layer_norm_forward{"add_layer_norm_forward"};

inline const Kernel<void(DType, const void* x, const void* extra, const void* gamma, double eps,
                         void* sum, void* y, void* rstd, int64_t rows, int64_t h)>
    add_rms_norm_forward{"add_rms_norm_forward"};

}  // namespace transformer_ops::cpu

namespace transformer_ops::cuda {

enum class Norm : uint8_t { LayerNorm, RMSNorm, L2 };

struct NormForward {
  Norm norm;
  DType dtype;
  const void* x;
  const void* extra = nullptr;  // normalizes x + extra, rounded to dtype
  Vector gamma = {}, beta = {};
  double eps;
  void* sum = nullptr;  // receives x + extra; may be null
  void* y;
  void* mean = nullptr;  // LayerNorm only
  void* rstd;            // L2: 1 / sqrt(sum(x^2) + eps)
  int64_t rows, h;
};

struct NormBackward {
  Norm norm;
  DType dtype;
  const void* grad_y;
  const void* x;
  const void* mean = nullptr;
  const void* rstd;
  Vector gamma = {};
  const void* residual = nullptr;  // is added to grad_x; both have residual_dtype
  DType residual_dtype;            // dtype or acc; always that of grad_x
  void* grad_x;
  Gradient grad_gamma = {}, grad_beta = {};
  void* partials = nullptr;  // acc [parts, wanted gradients, h]; null if none is wanted
  int64_t parts = 0;         // from norm_backward_parts
  int64_t rows, h;
};

// y = (x - mean) rstd gamma + beta from the statistics of a norm; without mean it is 0.
struct Normalize {
  DType dtype;
  const void* x;
  const void* mean = nullptr;
  const void* rstd;
  Vector gamma = {}, beta = {};
  void* y;
  int64_t rows, h;
};

inline const Kernel<void(Stream, const NormForward&)> norm_forward{"norm_forward"};

inline const Kernel<void(Stream, const NormBackward&)> norm_backward{"norm_backward"};

inline const Kernel<void(Stream, const Normalize&)> normalize{"normalize"};

inline const Kernel<int64_t(int64_t rows, int64_t h)> norm_backward_parts{"norm_backward_parts"};

}  // namespace transformer_ops::cuda
