// Rows of a cross entropy: the loss of each row of logits, and the gradients of the logits.
#pragma once

#include "kernels/cpu.h"
#include "kernels/cuda.h"

namespace transformer_ops::kernel {

// The logits of a row are z, or softcap tanh(z / softcap) if softcap is not 0. Its loss is
//   lse - (1 - label_smoothing) z[target] - label_smoothing mean(z) + z_loss lse^2
// with lse = log(sum(exp(z))). A row whose target is ignore_index has the loss 0.
struct CrossEntropy {
  int64_t classes;
  int64_t ignore_index;
  double label_smoothing;
  double softcap;
  double z_loss;
};

}  // namespace transformer_ops::kernel

namespace transformer_ops::cpu {

using kernel::CrossEntropy;

// For each row, in acc: lse, the loss, and the log-probability of the target. `correct` is 1 if the
// target is the first class with the largest logit, else 0. All are 0 for ignored rows.
inline const Kernel<void(const CrossEntropy&, DType, const void* logits, const int64_t* target,
                         void* lse, void* loss, void* log_probs, uint8_t* correct, int64_t rows)>
    cross_entropy_forward{"cross_entropy_forward"};

// Overwrites the logits of each row by the gradients of its loss, times its factor. lse and factors
// are acc.
inline const Kernel<void(const CrossEntropy&, DType, void* logits, const int64_t* target,
                         const void* lse, const void* factors, int64_t rows)>
    cross_entropy_backward{"cross_entropy_backward"};

}  // namespace transformer_ops::cpu

namespace transformer_ops::cuda {

// One number for each row; all but `correct` are acc.
struct CrossEntropyRows {
  void* lse;  // is read if `loss` is null
  void* loss = nullptr;
  void* log_probs = nullptr;
  uint8_t* correct = nullptr;
  const void* factors = nullptr;  // null: the logits stay
};

// Both of the above, in one launch: a block reads its row twice, the second time from the cache.
// A target that is neither a class nor ignore_index is printed, and ends the context as torch's own
// assertions do.
inline const Kernel<void(Stream, const kernel::CrossEntropy&, DType, void* logits,
                         const int64_t* target, const CrossEntropyRows&, int64_t rows)>
    cross_entropy{"cross_entropy"};

}  // namespace transformer_ops::cuda
