// What op/rounded.h does to the first result of an op: the two ways to round a few rows at a time.
#pragma once

#include <string>

#include "fuser/schema.h"
#include "op/typed_op.h"

namespace transformer_ops {

// `added`: the arguments that the rounding adds to those of the op.
struct RowRounding {
  std::string suffix;  // of the name of the op that rounds
  std::vector<Schema::Field> arguments;
  std::vector<std::string> results;  // tensors, each named <first result>_<this>
  void (*check)(const Checks& check, Values added);
  // Of `results`. One without dimensions is the largest of what each few rows give.
  TensorSpecs (*shape)(const TensorSpec& first, Values added);
  // The rounded tensor, and then `results`.
  Tensors (*decomposition)(const Checks& check, const Tensor& x, Values added);
  int64_t (*rows_of_block)(Values added);
  // Rounds x where it is, and fills `results`, undefined ones excepted.
  void (*run)(Body Bodies::*on_device, const Call& call, const Tensor& x, Values added,
              const Tensors& results);
};

// By the scales of blocks, which follow from the rows: to `format`, and to `column_format` beside
// it; without one that result has no elements.
//   <op>.rounded(..., str format, str column_format) -> (..., Tensor <first result>_columns)
// By a scale of the tensor that is known before it, to values of codes (quantize_values_scaled).
//   <op>.rounded_by(..., Tensor fp8_scale, int fp8_place, str format, bool with_amax)
//       -> (..., Tensor <first result>_decodes, Tensor <first result>_amax)
const std::vector<RowRounding>& row_roundings();

}  // namespace transformer_ops
