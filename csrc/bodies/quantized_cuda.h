// Quantized tensors on CUDA.
#pragma once

#include "bodies/quantized.h"

namespace transformer_ops {

// The largest magnitude, in the first of some floats.
Tensor largest_cuda(const Tensor& x);

// Of a format with a scale of the tensor, that is `encodes`, in device memory; by default it
// follows from the largest magnitude. `decodes` takes its inverse.
void encode_cuda(const kernel::Format& format, const Tensor& x, void* codes, void* scales,
                 void* decodes, const float* encodes = nullptr);

// Of NVFP4 whose blocks are 16 rows high: codes of two rows in a byte.
void encode_row_pairs_cuda(const kernel::Format& format, const Tensor& x, const Tensor& codes,
                           const Tensor& scale);

// What a product takes of such a format: the values of the codes or, where `output` is of their
// dtype, the codes. `decodes` takes by what those are to be multiplied.
void encode_operand_cuda(const kernel::Format& format, const Tensor& x, const Tensor& output,
                         const Tensor& decodes, const float* encodes = nullptr);

}  // namespace transformer_ops
