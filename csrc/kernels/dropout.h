// Dropout.
#pragma once

#include "kernels/cpu.h"
#include "kernels/cuda.h"

namespace transformer_ops::cpu {

// Element i of the tensor is kept if its random 32-bit integer is at least p * 2^32, so a mask
// depends neither on the split into ranges nor on the instruction set. The upper and lower half of
// that integer are 16 bits of Philox4x32-7, from bit 16 (i % 8) on: those with (key = seed, counter
// = (i / 8, 0)), and those with counter (i / 8, 1). A counter is two 64-bit numbers.
// `first` is the index of the range's first element, a multiple of 8; mask points at its byte. y =
// x / (1 - p) if kept, else 0. A null mask is not written.
inline const Kernel<void(DType, const void* x, void* y, uint8_t* mask, uint64_t seed, double p,
                         int64_t first, int64_t n)>
    dropout_forward{"dropout_forward"};

inline const Kernel<void(DType, const void* grad_y, const uint8_t* mask, void* grad_x, double p,
                         int64_t n)>
    dropout_backward{"dropout_backward"};

// The same from seed instead of mask.
inline const Kernel<void(DType, const void* grad_y, void* grad_x, uint64_t seed, double p,
                         int64_t first, int64_t n)>
    dropout_backward_from_seed{"dropout_backward_from_seed"};

// y = dropout(x + bias) + extra for the elements from `first` on, in rows of h. bias is an acc
// array of h. `sum` says whether extra and y have x's dtype or are acc arrays. Mask, seed, p and
// first are those of dropout_forward; with p = 0 all elements are kept.
inline const Kernel<void(DType, DType sum, const void* x, const void* bias, const void* extra,
                         void* y, uint8_t* mask, uint64_t seed, double p, int64_t first, int64_t n,
                         int64_t h)>
    bias_dropout_add{"bias_dropout_add"};

}  // namespace transformer_ops::cpu

namespace transformer_ops::cuda {

// dropout_forward and bias_dropout_add advance the generator's offset by this number.
constexpr uint64_t kPhiloxOffsets = 8;

// Element i is kept if its random 32-bit integer is at least p * 2^32, whatever the launch. It is
// word i % 4 of Philox4x32-7(key = seed, counter = (i / 8, offset / 4 + i % 8 / 4)), where a
// counter is two 64-bit numbers. There are 7 rounds, not torch's 10: torch does not use these
// numbers. A null mask is not written.
inline const Kernel<void(Stream, DType, const void* x, void* y, uint8_t* mask, const Philox&,
                         double p, int64_t n)>
    dropout_forward{"dropout_forward"};

inline const Kernel<void(Stream, DType, const void* grad_y, const uint8_t* mask, void* grad_x,
                         double p, int64_t n)>
    dropout_backward{"dropout_backward"};

// y = dropout(x + bias) + extra; extra and y have the dtype `sum`: dtype, or acc.
inline const Kernel<void(Stream, DType, DType sum, const void* x, const Vector& bias,
                         const void* extra, void* y, uint8_t* mask, const Philox&, double p,
                         int64_t rows, int64_t h)>
    bias_dropout_add{"bias_dropout_add"};

}  // namespace transformer_ops::cuda
