// CPU kernels on raw, contiguous memory. Each is single threaded and works on the range it is
// given.
//
// "acc" is the compute type: float, or double for Float64. Statistics, gamma, beta, bias and
// column sums are acc arrays. Pointers need no alignment beyond that of their elements. An output
// may be exactly one of the inputs of the same shape; any other overlap is not allowed.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/types.h"

namespace transformer_ops::cpu {

using kernel::Activation;
using kernel::DType;
using kernel::Glu;
using kernel::GluKind;

struct Kernels {
  const char* isa;  // "default", "avx2" or "avx512"

  // ---- elementwise ----
  void (*activation_forward)(Activation, DType, const void* x, void* y, int64_t n);
  void (*activation_backward)(Activation, DType, const void* grad_y, const void* x, void* grad_x,
                              int64_t n);
  // ReLU and SReLU only: the gradient from the output.
  void (*activation_backward_from_output)(Activation, DType, const void* grad_y, const void* y,
                                          void* grad_x, int64_t n);
  // Bit i % 8 of mask[i / 8] tells whether the gradient passes: !(x[i] <= 0), as in torch, so
  // that NaN passes. A range starts at a multiple of 8 elements; the last byte is zero padded.
  void (*relu_forward)(DType, const void* x, void* y, uint8_t* mask, int64_t n);
  void (*relu_backward)(DType, const void* grad_y, const uint8_t* mask, void* grad_x, int64_t n);
  void (*convert_from_acc)(DType, const void* acc, void* out, int64_t n);
  void (*convert_to_acc)(DType, const void* in, void* acc, double add, int64_t n);  // in + add

  // ---- gated linear units: x is rows x 2h, y is rows x h ----
  void (*glu_forward)(const Glu&, DType, const void* x, void* y, int64_t rows, int64_t h);
  void (*glu_backward)(const Glu&, DType, const void* grad_y, const void* x, void* grad_x,
                       int64_t rows, int64_t h);
  // y is that of x + bias, which kept takes as it is rounded; kept may be x, or null.
  void (*bias_glu_forward)(const Glu&, DType, const void* x, const void* bias, void* kept, void* y,
                           int64_t rows, int64_t h);

  // ---- norms over rows of h ----
  // gamma[h] and beta[h] may be null (absent). grad_gamma[h] and grad_beta[h] are added to and may
  // be null (not wanted). mean and rstd hold one number a row.
  void (*layer_norm_forward)(DType, const void* x, const void* gamma, const void* beta, double eps,
                             void* y, void* mean, void* rstd, int64_t rows, int64_t h);
  void (*layer_norm_backward)(DType, const void* grad_y, const void* x, const void* mean,
                              const void* rstd, const void* gamma, void* grad_x, void* grad_gamma,
                              void* grad_beta, int64_t rows, int64_t h);
  // grad_x = the same + residual, both rows x h, of acc values where `wide`.
  void (*layer_norm_residual_backward)(DType, bool wide, const void* grad_y, const void* x,
                                       const void* mean, const void* rstd, const void* gamma,
                                       const void* residual, void* grad_x, void* grad_gamma,
                                       void* grad_beta, int64_t rows, int64_t h);
  // rstd = 1 / sqrt(mean(x^2) + eps)
  void (*rms_norm_forward)(DType, const void* x, const void* gamma, double eps, void* y, void* rstd,
                           int64_t rows, int64_t h);
  void (*rms_norm_backward)(DType, const void* grad_y, const void* x, const void* rstd,
                            const void* gamma, void* grad_x, void* grad_gamma, int64_t rows,
                            int64_t h);
  void (*rms_norm_residual_backward)(DType, bool wide, const void* grad_y, const void* x,
                                     const void* rstd, const void* gamma, const void* residual,
                                     void* grad_x, void* grad_gamma, int64_t rows, int64_t h);
  // rstd = 1 / sqrt(sum(x^2) + eps)
  void (*l2_norm_forward)(DType, const void* x, double eps, void* y, void* rstd, int64_t rows,
                          int64_t h);
  void (*l2_norm_backward)(DType, const void* grad_y, const void* x, const void* rstd, void* grad_x,
                           int64_t rows, int64_t h);
  // y = (x - mean) rstd gamma + beta from the statistics of a norm; mean is null for the others
  void (*normalize)(DType, const void* x, const void* mean, const void* rstd, const void* gamma,
                    const void* beta, void* y, int64_t rows, int64_t h);

  // ---- bias: acc arrays of h; column sums are added to, and sum values not yet rounded ----
  void (*column_sum)(DType, const void* x, void* out, int64_t rows, int64_t h);
  void (*bias_add)(DType, const void* x, const void* bias, void* y, int64_t rows, int64_t h);
  void (*activation_bias_backward)(Activation, DType, const void* grad_y, const void* x,
                                   void* grad_x, void* grad_bias, int64_t rows, int64_t h);
  // first_element is the index in mask of the first element's bit; any value.
  void (*relu_bias_backward)(DType, const void* grad_y, const uint8_t* mask, int64_t first_element,
                             void* grad_x, void* grad_bias, int64_t rows, int64_t h);
  void (*dropout_bias_backward)(DType, const void* grad_y, const uint8_t* mask,
                                int64_t first_element, double p, void* grad_x, void* grad_bias,
                                int64_t rows, int64_t h);
  // x and grad_x are rows x 2h, grad_bias has 2h.
  void (*glu_bias_backward)(const Glu&, DType, const void* grad_y, const void* x, void* grad_x,
                            void* grad_bias, int64_t rows, int64_t h);

  // ---- backward with the value again: before a product's backward, which needs both ----
  // buffer, rows x n, holds grad_y and takes y. Rows of x and grad_x are `stride` apart; the
  // column sums of grad_x are added to grad_bias, unless that is null.
  void (*activation_value_and_backward)(Activation, DType, void* buffer, const void* x,
                                        void* grad_x, void* grad_bias, int64_t rows, int64_t n,
                                        int64_t stride);
  // The same for columns first to first + n of y, out of h. x and grad_x are rows x 2h. The blocks
  // of interleave divide first and n.
  void (*glu_value_and_backward)(const Glu&, DType, void* buffer, const void* x, void* grad_x,
                                 int64_t rows, int64_t n, int64_t h, int64_t first);

  // ---- dropout ----
  // Element i of the tensor is kept where its random 32-bit integer is at least p * 2^32, so that
  // a mask depends on neither the split into ranges nor the instruction set. The upper and lower
  // half of that integer are the 16 bits from bit 16 (i % 8) on of Philox4x32-7(key = seed, counter
  // = (i / 8, 0)) and of counter (i / 8, 1): two 64-bit numbers make a counter.
  // `first` is the index of the range's first element, a multiple of 8; mask points at its byte.
  // y = x / (1 - p) where kept, else 0. A null mask is not written.
  void (*dropout_forward)(DType, const void* x, void* y, uint8_t* mask, uint64_t seed, double p,
                          int64_t first, int64_t n);
  void (*dropout_backward)(DType, const void* grad_y, const uint8_t* mask, void* grad_x, double p,
                           int64_t n);
  // The same from seed instead of mask.
  void (*dropout_backward_from_seed)(DType, const void* grad_y, void* grad_x, uint64_t seed,
                                     double p, int64_t first, int64_t n);

  // ---- residuals ----
  // y = dropout(x + bias) + extra for the elements from `first` on of rows of h; bias is an acc
  // array of h; extra and y have x's dtype or are acc arrays, as `sum` says. Mask, seed, p and
  // first are those of dropout_forward; with p = 0 all are kept.
  void (*bias_dropout_add)(DType, DType sum, const void* x, const void* bias, const void* extra,
                           void* y, uint8_t* mask, uint64_t seed, double p, int64_t first,
                           int64_t n, int64_t h);
  // sum = x + extra, and its norm as above: of the sum as it is rounded, so that whoever reads it
  // later computes the same. A null sum is not written.
  void (*add_layer_norm_forward)(DType, const void* x, const void* extra, const void* gamma,
                                 const void* beta, double eps, void* sum, void* y, void* mean,
                                 void* rstd, int64_t rows, int64_t h);
  void (*add_rms_norm_forward)(DType, const void* x, const void* extra, const void* gamma,
                               double eps, void* sum, void* y, void* rstd, int64_t rows, int64_t h);
};

// The kernels for the widest instruction set of this machine. The environment variable
// TRANSFORMER_OPS_ISA=default|avx2|avx512, read on the first call, lowers the choice.
const Kernels& kernels();

// The kernels for one instruction set by name; null where the build or the machine lacks it.
const Kernels* kernels_for(std::string_view isa);

const char* isa_name();

}  // namespace transformer_ops::cpu
