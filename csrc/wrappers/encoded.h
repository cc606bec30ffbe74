// Encodes blocks of numbers as codes and scales in plain ATen calls, independently of the kernels.
#pragma once

#include "kernels/format.h"
#include "op/typed_op.h"

namespace transformer_ops {

// The codes (uint8, one a byte) of numbers that are already scaled, and the numbers of codes.
Tensor encode_numbers(kernel::Element element, const Tensor& scaled);
Tensor values_of_codes(kernel::Element element, const Tensor& codes);
// Decodes by shifting bits, because a power computed on a GPU need not be exact.
Tensor decoded_e8m0(const Tensor& bytes);

// The codes and scales of blocks [down, block_rows, across, block_columns], from the largest
// magnitude of each block and of the tensor. `stochastic` rounds up or down at random.
struct Encoded {
  Tensor codes;                      // the codes of blocks, one a byte
  Tensor stored, tensor_scale = {};  // tensor_scale is set if the format has one besides block
                                     // scales

  Encoded(const kernel::Format& format, const Tensor& split, const Tensor& amax,
          const Tensor& of_tensor, bool stochastic);
};

}  // namespace transformer_ops
