#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fuser/dtype.h"

namespace transformer_ops {

// A format of quantized numbers: a row of kernels/format.h, or none for exact numbers. Plans, keys
// and recipes hold this value. Its name is used only in schemas and texts.
class NumberFormat {
 public:
  constexpr NumberFormat() = default;  // exact

  // Finds a format by name; the empty name means exact numbers. Throws PlanError with the nearest
  // name if there is no such format.
  static NumberFormat named(std::string_view name);
  // Returns exact numbers if there is no format of that name.
  static NumberFormat find(std::string_view name);
  // The format with this largest number and one float32 scale for the whole tensor, or exact
  // numbers if there is none.
  static NumberFormat of_tensor(float largest);

  bool is_exact() const { return number_ == 0; }
  std::string name() const;

  // The same format with blocks that are parts of a column. Returns the format itself if its blocks
  // are not parts of a row. Throws PlanError if there is no such format.
  NumberFormat of_columns() const;

  // Does the format have a scale of the whole tensor, alone or besides block scales?
  bool has_tensor_scale() const;
  // Is a scale of the whole tensor its only one?
  bool has_one_scale() const;
  // Does the format have 4-bit codes, two in a byte?
  bool has_pairs_of_codes() const;
  // The number of rows in a block; 0 if a number depends on the whole tensor.
  int64_t rows_of_block() const;
  // The largest number of the format; 0 for exact numbers.
  float largest() const;
  // The dtype of codes with one scale for the whole tensor; empty for other formats.
  std::string codes_dtype() const;
  // The dtype in which numbers of the format are exact, and in which products with results of dtype
  // `wanted` may be computed. `scalable`: the product takes a separate scale of the whole tensor.
  DType operand_dtype(DType wanted, bool scalable) const;

  bool operator==(const NumberFormat&) const = default;

 private:
  friend bool are_multiplied_in_blocks(const std::vector<NumberFormat>& formats);
  explicit constexpr NumberFormat(uint8_t number) : number_(number) {}

  uint8_t number_ = 0;  // the number of the row, from 1
};

// Can a GPU multiply codes of these formats? Block scales must be powers of two: float32 for blocks
// of 128, or bytes for blocks of 32. All blocks must have one size, but not all may be square, and
// not all codes may be E5M2. NVFP4 is multiplied if its blocks are rows or square.
bool are_multiplied_in_blocks(const std::vector<NumberFormat>& formats);

}  // namespace transformer_ops
