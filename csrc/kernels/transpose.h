// Transposes matrices on CUDA, into the layouts that cuBLASLt reads for codes and their scales.
#pragma once

#include "kernels/cuda.h"

namespace transformer_ops::cuda {

// to[j * to_stride + i] = from[i * from_stride + j] for i < rows and j < cols, for elements of 1 or
// 4 bytes. Memory between the rows of `to` does not change.
inline const Kernel<void(Stream, int bytes, const void* from, int64_t from_stride, void* to,
                         int64_t to_stride, int64_t rows, int64_t cols)>
    transpose{"transpose"};

// Arranges one-byte scales in tiles (Scaling::Vectors32 and Vectors16 of kernels/gemm.h), for
// `outers` rows and `inners` blocks. The scale of row i and block b is at from[i / height *
// outer_stride + b * inner_stride].
inline const Kernel<void(Stream, const void* from, int64_t height, int64_t outer_stride,
                         int64_t inner_stride, void* to, int64_t outers, int64_t inners)>
    tile_scales{"tile_scales"};

// Computes Gemm::factors: left * right * alpha, and beta. left and right point to 4 bytes of any
// alignment that hold a float32; a null one counts as 1.
inline const Kernel<void(Stream, const void* left, const void* right, float alpha, float beta,
                         float* to)>
    join_factors{"join_factors"};

}  // namespace transformer_ops::cuda
