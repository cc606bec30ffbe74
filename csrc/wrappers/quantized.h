// What the ops of quantized tensors share: formats by name, the sizes of codes and scales, and what
// they mean in plain ATen calls.
#pragma once

#include <c10/util/FunctionRef.h>

#include "kernels/format.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises where there is none of that name.
const kernel::Format& format_of(const Checks& check, std::string_view name);

// Raises where no op computes in it.
at::ScalarType dtype_named(const Checks& check, std::string_view name);

// What an operand of a product is rounded to: one of those, or codes of a format with one scale.
at::ScalarType operand_dtype_named(const Checks& check, const kernel::Format& format,
                                   std::string_view name);

// Of a tensor of these sizes. Codes of 4 bits are two a byte: the last dimension is halved and
// rounded up. There is a scale for each block of a row, or of several of the rows that the leading
// dimensions make; of a tensor with one scale, it has no dimension. Scales of NVFP4 are the bytes
// of all blocks in one dimension, and after them the 4 of the tensor's float32.
TensorSpec codes_spec(const kernel::Format& format, c10::SymIntArrayRef sizes);
TensorSpec scale_spec(const kernel::Format& format, c10::SymIntArrayRef sizes);

// The format with a power of two, or E8M0, for each block that codes and scales may be of; null
// where there is none. By their sizes alone: where those fit two formats, the scales mean the same
// in both.
const kernel::Format* find_block_format(const Tensor& codes, const Tensor& scale);

// A tensor as rows of its last dimension; one without dimensions is one row of one number.
struct FlatRows {
  int64_t rows = 1, h = 1;

  explicit FlatRows(at::IntArrayRef sizes) {
    for (const int64_t size : sizes.slice(0, sizes.empty() ? 0 : sizes.size() - 1)) rows *= size;
    if (!sizes.empty()) h = sizes.back();
  }
};

// The bytes of `scale` that hold the inverse of the scale of the whole tensor; null in formats
// without one.
inline uint8_t* tensor_scale_of(const kernel::Format& format, const Tensor& scale) {
  if (!format.per_tensor() && !format.has_tensor_scale()) return nullptr;
  return static_cast<uint8_t*>(scale.mutable_data_ptr()) + scale.nbytes() - sizeof(float);
}

// (codes, scale). `stochastic` rounds up or down at random, by torch's generator, so that the mean
// is the number itself; not for integers.
std::tuple<Tensor, Tensor> quantize_decomposed(const kernel::Format& format, const Tensor& input,
                                               bool stochastic = false);
Tensor dequantize_decomposed(const kernel::Format& format, const Tensor& codes, const Tensor& scale,
                             c10::SymIntArrayRef sizes, at::ScalarType dtype);
// Rows of groups, rounded to the numbers of a format as a tensor for each group: the bands of
// block_rows rows, or of one row where a tensor is one block, are of one group each. `of_groups` is
// given the largest magnitude of each band, and gives that of its group.
Tensor round_bands_decomposed(const kernel::Format& format, const Tensor& rows,
                              c10::function_ref<Tensor(const Tensor&)> of_groups,
                              at::ScalarType dtype, bool stochastic);
// The values of the codes, or codes, and the scale of the tensor by which they are to be
// multiplied: of a format that has one.
std::tuple<Tensor, Tensor> values_decomposed(const kernel::Format& format, const Tensor& input,
                                             at::ScalarType dtype, bool stochastic = false);
// Rounded to the numbers of a format, which is encoded by `scale`, a tensor of one number; and the
// largest magnitude. Without `decodes` the values of the codes, not divided by the scale, or codes.
std::tuple<Tensor, Tensor> round_by_scale_decomposed(const kernel::Format& format,
                                                     const Tensor& input, const Tensor& scale,
                                                     at::ScalarType dtype, bool decodes = true);
// The same of each row of a matrix, by a column of scales.
std::tuple<Tensor, Tensor> round_rows_by_scale_decomposed(const kernel::Format& format,
                                                          const Tensor& rows, const Tensor& scales,
                                                          at::ScalarType dtype);

}  // namespace transformer_ops
