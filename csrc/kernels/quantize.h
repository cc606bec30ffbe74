// Conversion of rows of h numbers to codes and scales, and back.
#pragma once

#include "kernels/cpu.h"
#include "kernels/cuda.h"
#include "kernels/format.h"

namespace transformer_ops::cpu {

using kernel::TensorScale;

// Rows have h bytes of codes, or ceil(h / 2) if codes have 4 bits. A range of rows starts at a
// multiple of the format's block_rows, and includes all scales of its blocks.

// The largest magnitude as float32: NaN if there is one, 0 without numbers.
inline const Kernel<float(DType, const void* x, int64_t n)> largest{"largest"};

// Scales of a format that has one block are not written.
inline const Kernel<void(const kernel::Format&, DType, const void* x, const TensorScale&,
                         void* codes, void* scales, int64_t rows, int64_t h)>
    quantize{"quantize"};

// decoded_tensor_scale is the inverse of tensor_scale; a tensor with one block has no other scale.
inline const Kernel<void(const kernel::Format&, DType, const void* codes, const void* scales,
                         float decoded_tensor_scale, void* out, int64_t rows, int64_t h)>
    dequantize{"dequantize"};

// Computes bitwise what quantize() and dequantize() would, without producing codes.
inline const Kernel<void(const kernel::Format&, DType from, DType to, const void* x,
                         const TensorScale&, void* out, int64_t rows, int64_t h)>
    round_to_format{"round_to_format"};

// The same, up or down at random with the right mean; numbers that are too large become the largest
// number. Not for integers. Number i of row r uses 16 bits: piece i % 8 of Philox4x32-7(key = seed,
// counter = r * ceil(h / 8) + i / 8), where first_row is the number of x's first row.
inline const Kernel<void(const kernel::Format&, DType from, DType to, const void* x,
                         const TensorScale&, uint64_t seed, int64_t first_row, void* out,
                         int64_t rows, int64_t h)>
    round_at_random{"round_at_random"};

}  // namespace transformer_ops::cpu

namespace transformer_ops::cuda {

// The size of `partials` for largest(); its first number receives the largest magnitude.
inline const Kernel<int64_t(int64_t n)> largest_parts{"largest_parts"};

inline const Kernel<void(Stream, DType, const void* x, float* partials, int64_t n)> largest{
    "largest"};

// Formats with one block, or with a scale of the tensor, take either amax or the scale itself, and
// store its inverse, 4 bytes of any alignment; for other formats these are null. Formats that
// choose scales need amax.
inline const Kernel<void(Stream, const kernel::Format&, DType, const void* x, const float* amax,
                         const float* tensor_scale, void* codes, void* scales,
                         void* decoded_tensor_scale, int64_t rows, int64_t h)>
    quantize{"quantize"};

// The same for NVFP4 with blocks of 16 rows, from amax. A byte has codes of two rows, the upper row
// in the low bits: ceil(rows / 2) rows of h bytes.
inline const Kernel<void(Stream, const kernel::Format&, DType, const void* x, const float* amax,
                         void* codes, void* scales, void* decoded_tensor_scale, int64_t rows,
                         int64_t h)>
    quantize_row_pairs{"quantize_row_pairs"};

inline const Kernel<void(Stream, const kernel::Format&, DType, const void* codes,
                         const void* scales, const void* decoded_tensor_scale, void* out,
                         int64_t rows, int64_t h)>
    dequantize{"dequantize"};

// Rows of groups, one group after another, in device memory. Gives the end of each of `count`
// groups, counted in rows and in bands of the format's block_rows; each group starts a band. Rows
// after the last group are in none. Without `rows` all rows are one group.
struct GroupEnds {
  const int64_t* rows = nullptr;
  const int64_t* bands = nullptr;
  int64_t count = 1;
};

// The largest magnitude of each group, or the old value of amax if that is larger.
inline const Kernel<void(Stream, DType, const void* x, const GroupEnds&, float* amax, int64_t rows,
                         int64_t h)>
    largest_of_groups{"largest_of_groups"};

// Computes bitwise what quantize() and dequantize() would for each group as a tensor, without
// producing codes; rows in no group become zeros. Formats with one block, or with a scale of the
// tensor, take amax or the scales themselves, a number for each group; those that choose scales
// need amax.
inline const Kernel<void(Stream, const kernel::Format&, DType from, DType to, const void* x,
                         const GroupEnds&, const float* amax, const float* scales, void* out,
                         int64_t rows, int64_t h)>
    round_groups{"round_groups"};

}  // namespace transformer_ops::cuda
