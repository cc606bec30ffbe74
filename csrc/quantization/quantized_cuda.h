// Quantized tensors on CUDA.
#pragma once

#include "wrappers/quantized.h"

namespace transformer_ops {

// The largest magnitude, in the first of some floats.
Tensor largest_cuda(const Tensor& x);

// Encodes a tensor. `encodes` is the scale of the tensor, in device memory, if the format has one;
// by default it follows from the largest magnitude. `decodes` receives its inverse.
void encode_cuda(const kernel::Format& format, const Tensor& x, void* codes, void* scales,
                 void* decodes, const float* encodes = nullptr);

// Encodes to an NVFP4 format with blocks of 16 rows, with codes of two rows in a byte.
void encode_row_pairs_cuda(const kernel::Format& format, const Tensor& x, const Tensor& codes,
                           const Tensor& scale);

// Rounds to numbers. If `decodes` is defined, rounds to the values of codes, or to codes if
// `output` has their dtype, and `decodes` receives the factor by which to multiply them.
void round_cuda(const kernel::Format& format, const Tensor& x, const Tensor& output,
                const Tensor& decodes = {}, const float* encodes = nullptr);

// Rounds matrices separately; check_rounded_groups() lists the cases. `encodes` holds a scale for
// each, if the format has a scale of the tensor; by default they follow from the largest
// magnitudes. Nothing is read on the host.
void round_groups_cuda(const kernel::Format& format, const Tensors& input, const Tensor* splits,
                       const Tensors& output, const Tensor& encodes = {});
// `amax` receives the largest magnitude of each matrix, or `nothing` if it has no rows.
void largest_of_groups_cuda(const Tensors& input, const Tensor* splits, float nothing,
                            const Tensor& amax);

}  // namespace transformer_ops
