// Numbers of blocks as codes and scales, in plain ATen calls: another way than that of the kernels.
#pragma once

#include "kernels/format.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Codes of numbers that are scaled already, in uint8, one a byte; and the numbers of codes.
Tensor encode_numbers(kernel::Element element, const Tensor& scaled);
Tensor values_of_codes(kernel::Element element, const Tensor& codes);
// Shifts bits, because a power that a GPU computes need not be exact.
Tensor decoded_e8m0(const Tensor& bytes);

// The codes and scales of blocks [down, block_rows, across, block_columns], from the largest
// magnitude of each block and of the tensor. `stochastic` rounds up or down at random.
struct Encoded {
  Tensor codes;                      // of blocks, one a byte
  Tensor stored, tensor_scale = {};  // the latter where the format has one beside those of blocks

  Encoded(const kernel::Format& format, const Tensor& split, const Tensor& amax,
          const Tensor& of_tensor, bool stochastic);
};

}  // namespace transformer_ops
