// Quantized tensors on CUDA.
#pragma once

#include "wrappers/quantized.h"

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

// Matrices that are rounded each on its own: check_rounded_groups() says which. `encodes` holds a
// scale for each, in formats that have one of the tensor; by default they follow from the largest
// magnitudes. Nothing is read on the host.
void round_groups_cuda(const kernel::Format& format, const Tensors& input, const Tensor* splits,
                       const Tensors& output, const Tensor& encodes = {});
// `amax` takes the largest magnitude of each, `nothing` where that has no rows.
void largest_of_groups_cuda(const Tensors& input, const Tensor* splits, float nothing,
                            const Tensor& amax);

}  // namespace transformer_ops
