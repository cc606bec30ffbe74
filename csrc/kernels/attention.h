// Passes over rows of attention scores, for attention in parts.
#pragma once

#include "kernels/cpu.h"

namespace transformer_ops::cpu {

// Rows of scores in acc, of `columns` numbers each. A score is product * scale + mask.
struct Scores {
  int64_t columns = 0;
  double scale = 1;
  // One row of `columns` acc numbers for row 0, and the distance to that for the next row, which
  // may be 0. Null if there is no mask.
  const void* mask = nullptr;
  int64_t mask_stride = 0;
  // The number of columns that row 0 may attend to; each next row may attend to one more. Rows of
  // full attention may attend to all.
  int64_t attended = 0;
  bool causal = false;
  bool nan_rows = false;
  // The distance between the statistics of two rows.
  int64_t stride = 1;
};

// products becomes the softmax of the scores, and log_sum_exp[r stride] its statistic. A row that
// the mask lets attend to nothing becomes zeros, with a statistic of 0, or NaN with `nan_rows`.
inline const Kernel<void(DType acc, void* products, const Scores&, void* log_sum_exp, int64_t rows)>
    attention_softmax{"attention_softmax"};

// The same softmax, from its statistic.
inline const Kernel<void(DType acc, void* products, const Scores&, const void* log_sum_exp,
                         int64_t rows)>
    attention_probabilities{"attention_probabilities"};

// With probabilities p and their gradient g: g becomes the gradient of the products,
// scale p (g - sum(g p)).
inline const Kernel<void(DType acc, const void* probabilities, const Scores&, void* grad,
                         int64_t rows)>
    attention_softmax_backward{"attention_softmax_backward"};

}  // namespace transformer_ops::cpu
