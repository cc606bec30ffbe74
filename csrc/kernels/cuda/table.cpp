// The table of this build's kernels. Each file of kernels defines its functions by the names and
// types of the table's rows: what differs does not link.
#include <type_traits>

#include "kernels/cuda/kernels.h"

namespace transformer_ops::cuda {

#define TRANSFORMER_OPS_ROWS(row)                                                                  \
  row(activation_forward) row(activation_backward) row(activation_backward_from_output)            \
      row(relu_forward) row(relu_backward) row(glu_forward) row(glu_backward)                      \
          row(bias_glu_forward) row(norm_forward) row(norm_backward) row(normalize)                \
              row(norm_backward_parts) row(bias_add) row(column_sum) row(activation_bias_backward) \
                  row(relu_bias_backward) row(dropout_bias_backward) row(glu_bias_backward)        \
                      row(column_sum_parts) row(dropout_forward) row(dropout_backward)             \
                          row(bias_dropout_add) row(gemm)

#define TRANSFORMER_OPS_DECLARE(name) std::remove_pointer_t<decltype(Kernels::name)> name;
#define TRANSFORMER_OPS_ENTER(name) .name = name,

TRANSFORMER_OPS_ROWS(TRANSFORMER_OPS_DECLARE)

const Kernels& compiled_kernels() {
  static const Kernels table = {TRANSFORMER_OPS_ROWS(TRANSFORMER_OPS_ENTER)};
  return table;
}

}  // namespace transformer_ops::cuda
