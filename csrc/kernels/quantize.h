// Rows of h numbers to codes and scales, and back.
#pragma once

#include "kernels/cpu.h"
#include "kernels/cuda.h"
#include "kernels/format.h"

namespace transformer_ops::cpu {

using kernel::TensorScale;

// Rows have ceil(h / 2) bytes of codes where those have 4 bits, else h. A range of rows starts at a
// multiple of the format's block_rows, and has all scales of its blocks.

// The largest magnitude as float32, NaN where there is one; 0 of nothing.
inline const Kernel<float(DType, const void* x, int64_t n)> largest{"largest"};

// Scales of a format that has one block are not written.
inline const Kernel<void(const kernel::Format&, DType, const void* x, const TensorScale&,
                         void* codes, void* scales, int64_t rows, int64_t h)>
    quantize{"quantize"};

// decoded_tensor_scale is the inverse of tensor_scale, and all there is of one block's scale.
inline const Kernel<void(const kernel::Format&, DType, const void* codes, const void* scales,
                         float decoded_tensor_scale, void* out, int64_t rows, int64_t h)>
    dequantize{"dequantize"};

// What quantize() and dequantize() make of the numbers, bit for bit, without codes on the way.
inline const Kernel<void(const kernel::Format&, DType from, DType to, const void* x,
                         const TensorScale&, void* out, int64_t rows, int64_t h)>
    round_to_format{"round_to_format"};

// The same up or down at random, so that the mean is the number itself; what is too large becomes
// the largest number. Not for integers. Number i of row r goes by 16 bits: the piece i % 8 of
// Philox4x32-7(key = seed, counter = r * ceil(h / 8) + i / 8), where the first row of x has the
// number first_row.
inline const Kernel<void(const kernel::Format&, DType from, DType to, const void* x,
                         const TensorScale&, uint64_t seed, int64_t first_row, void* out,
                         int64_t rows, int64_t h)>
    round_at_random{"round_at_random"};

}  // namespace transformer_ops::cpu

namespace transformer_ops::cuda {

// How many numbers largest() needs in `partials`, of which the first takes the largest magnitude.
inline const Kernel<int64_t(int64_t n)> largest_parts{"largest_parts"};

inline const Kernel<void(Stream, DType, const void* x, float* partials, int64_t n)> largest{
    "largest"};

// Formats with one block, or a scale of the tensor, take either amax or the scale itself, and store
// its inverse, 4 bytes of any alignment; for others these are null. Those that choose scales take
// amax.
inline const Kernel<void(Stream, const kernel::Format&, DType, const void* x, const float* amax,
                         const float* tensor_scale, void* codes, void* scales,
                         void* decoded_tensor_scale, int64_t rows, int64_t h)>
    quantize{"quantize"};

// The same of NVFP4 whose blocks are 16 rows high, from amax, with codes of two rows in a byte, the
// upper one lowest: ceil(rows / 2) rows of h bytes.
inline const Kernel<void(Stream, const kernel::Format&, DType, const void* x, const float* amax,
                         void* codes, void* scales, void* decoded_tensor_scale, int64_t rows,
                         int64_t h)>
    quantize_row_pairs{"quantize_row_pairs"};

inline const Kernel<void(Stream, const kernel::Format&, DType, const void* codes,
                         const void* scales, const void* decoded_tensor_scale, void* out,
                         int64_t rows, int64_t h)>
    dequantize{"dequantize"};

// Rows of groups, one group after another, in device memory: where each of `count` ends, counted in
// rows and in bands of the format's block_rows, of which each group begins one. What is behind the
// last one is in none. Without `rows` all rows are of one group.
struct GroupEnds {
  const int64_t* rows = nullptr;
  const int64_t* bands = nullptr;
  int64_t count = 1;
};

// The largest magnitude of each group, or what amax holds where that is larger.
inline const Kernel<void(Stream, DType, const void* x, const GroupEnds&, float* amax, int64_t rows,
                         int64_t h)>
    largest_of_groups{"largest_of_groups"};

// What quantize() and dequantize() make of each group as a tensor, bit for bit, without codes on
// the way; rows of none become zeros. Formats with one block, or a scale of the tensor, take amax
// or the scales themselves, a number for each group; those that choose scales take amax.
inline const Kernel<void(Stream, const kernel::Format&, DType from, DType to, const void* x,
                         const GroupEnds&, const float* amax, const float* scales, void* out,
                         int64_t rows, int64_t h)>
    round_groups{"round_groups"};

}  // namespace transformer_ops::cuda
