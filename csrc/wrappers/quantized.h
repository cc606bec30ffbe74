// Code shared by the ops on quantized tensors: formats by name, the sizes of codes and scales, and
// decompositions in plain ATen calls.
#pragma once

#include <c10/util/FunctionRef.h>

#include "kernels/format.h"
#include "op/typed_op.h"

namespace transformer_ops {

// Raises if there is no format of that name.
const kernel::Format& format_of(const Checks& check, std::string_view name);

// Raises if no op computes in the dtype.
at::ScalarType dtype_named(const Checks& check, std::string_view name);

// The dtype to which an operand of a product is rounded: one of those, or codes of a format with
// one scale.
at::ScalarType operand_dtype_named(const Checks& check, const kernel::Format& format,
                                   std::string_view name);

// The codes and scales of a tensor of these sizes. 4-bit codes are two a byte: the last dimension
// is halved and rounded up. There is a scale for each block of one or several rows (all leading
// dimensions count as rows). A scale of the whole tensor has no dimension. NVFP4 scales are one
// dimension of bytes: those of all blocks, then the 4 bytes of the tensor's float32.
TensorSpec codes_spec(const kernel::Format& format, c10::SymIntArrayRef sizes);
TensorSpec scale_spec(const kernel::Format& format, c10::SymIntArrayRef sizes);

// The format of codes and scales that has a power of two, or E8M0, for each block; null if there is
// none. It is found by sizes alone: if they fit two formats, the scales have the same meaning in
// both.
const kernel::Format* find_block_format(const Tensor& codes, const Tensor& scale);

// A tensor as rows of its last dimension; one without dimensions is one row of one number.
struct FlatRows {
  int64_t rows = 1, h = 1;

  explicit FlatRows(at::IntArrayRef sizes) {
    for (const int64_t size : sizes.slice(0, sizes.empty() ? 0 : sizes.size() - 1)) rows *= size;
    if (!sizes.empty()) h = sizes.back();
  }
};

// The bytes of `scale` with the inverse of the tensor's scale; null if the format has none.
inline uint8_t* tensor_scale_of(const kernel::Format& format, const Tensor& scale) {
  if (!format.per_tensor() && !format.has_tensor_scale()) return nullptr;
  return static_cast<uint8_t*>(scale.mutable_data_ptr()) + scale.nbytes() - sizeof(float);
}

// (codes, scale). `stochastic` rounds up or down at random with torch's generator, with the right
// mean. It is not available for integers.
std::tuple<Tensor, Tensor> quantize_decomposed(const kernel::Format& format, const Tensor& input,
                                               bool stochastic = false);
Tensor dequantize_decomposed(const kernel::Format& format, const Tensor& codes, const Tensor& scale,
                             c10::SymIntArrayRef sizes, at::ScalarType dtype);
// Rounds groups of rows to a format, each group as a tensor of its own. A band has block_rows rows,
// or one row if a tensor is one block, and belongs to one group. `of_groups` maps the largest
// magnitude of each band to that of its group.
Tensor round_bands_decomposed(const kernel::Format& format, const Tensor& rows,
                              c10::function_ref<Tensor(const Tensor&)> of_groups,
                              at::ScalarType dtype, bool stochastic);
// The values of the codes, or codes, and the scale by which they are to be multiplied, in a format
// with a scale of the tensor.
std::tuple<Tensor, Tensor> values_decomposed(const kernel::Format& format, const Tensor& input,
                                             at::ScalarType dtype, bool stochastic = false);
// The tensor rounded with the given `scale`, a tensor of one number, and its largest magnitude.
// Without `decodes` it is the codes, or their values, not divided by the scale.
std::tuple<Tensor, Tensor> round_by_scale_decomposed(const kernel::Format& format,
                                                     const Tensor& input, const Tensor& scale,
                                                     at::ScalarType dtype, bool decodes = true);
// The same for each row of a matrix, with a column of scales.
std::tuple<Tensor, Tensor> round_rows_by_scale_decomposed(const kernel::Format& format,
                                                          const Tensor& rows, const Tensor& scales,
                                                          at::ScalarType dtype);

}  // namespace transformer_ops
