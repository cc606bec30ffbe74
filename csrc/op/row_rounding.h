// The two ways in which op/rounded.h rounds the first result of an op, a band of rows at a time.
#pragma once

#include <string>

#include "fuser/schema.h"
#include "op/typed_op.h"

namespace transformer_ops {

// `added` holds the arguments that the rounding adds to those of the op.
struct RowRounding {
  std::string suffix;  // the suffix of the rounding op's name
  std::vector<Schema::Field> arguments;
  std::vector<std::string> results;  // tensors, each named <first result>_<this>
  void (*check)(const Checks& check, Values added);
  // The specs of `results`. A result without dimensions is the largest of the numbers of all bands.
  TensorSpecs (*shape)(const TensorSpec& first, Values added);
  // Returns the rounded tensor, and then `results`.
  Tensors (*decomposition)(const Checks& check, const Tensor& x, Values added);
  int64_t (*rows_of_block)(Values added);
  // Rounds x in place, and fills the defined tensors of `results`.
  void (*run)(Body Bodies::*on_device, const Call& call, const Tensor& x, Values added,
              const Tensors& results);
};

// The first row rounds by block scales, which follow from the rows: to `format`, and also to
// `column_format`. If that one is empty, its result has no elements.
//   <op>.rounded(..., str format, str column_format) -> (..., Tensor <first result>_columns)
// The second row rounds by a known scale of the tensor to values of codes (quantize_values_scaled).
//   <op>.rounded_by(..., Tensor fp8_scale, int fp8_position, str format, bool with_amax)
//       -> (..., Tensor <first result>_decodes, Tensor <first result>_amax)
const std::vector<RowRounding>& row_roundings();

}  // namespace transformer_ops
