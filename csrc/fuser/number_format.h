#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fuser/dtype.h"

namespace transformer_ops {

// A format of quantized numbers, which is a row of kernels/format.h, or none: exact numbers. It is
// what plans, keys and recipes hold; its name stands in schemas and texts alone.
class NumberFormat {
 public:
  constexpr NumberFormat() = default;  // exact

  // The format of a name; the empty name is that of exact numbers. Throws PlanError where there is
  // none, which names the nearest.
  static NumberFormat named(std::string_view name);
  // None where there is no format of that name.
  static NumberFormat find(std::string_view name);
  // The format with one scale for a tensor, any float, whose largest number this is; else none.
  static NumberFormat of_tensor(float largest);

  bool is_exact() const { return number_ == 0; }
  std::string name() const;

  // The same format with blocks that are parts of a column; itself where its blocks are no parts of
  // a row. Throws PlanError where there is no such format.
  NumberFormat of_columns() const;

  // Does the format have a scale of the whole tensor, beside those of blocks or alone?
  bool has_tensor_scale() const;
  // Does it have that scale alone?
  bool has_one_scale() const;
  // Has it codes of 4 bits, two in a byte?
  bool has_pairs_of_codes() const;
  // The rows of a block; 0 where a number depends on the whole tensor.
  int64_t rows_of_block() const;
  // The largest number of its codes; 0 of exact numbers.
  float largest() const;
  // The dtype of codes that have one scale alone; empty for others.
  std::string codes_dtype() const;
  // The dtype in which numbers of the format are exact, and products of them may be computed whose
  // result is `wanted`. `scalable`: the product takes a scale of the whole tensor beside them.
  DType operand_dtype(DType wanted, bool scalable) const;

  bool operator==(const NumberFormat&) const = default;

 private:
  friend bool are_multiplied_in_blocks(const std::vector<NumberFormat>& formats);
  explicit constexpr NumberFormat(uint8_t number) : number_(number) {}

  uint8_t number_ = 0;  // the row, from 1
};

// Does a GPU multiply codes of these formats? It does where the scale of each block is a power of
// two, in float32 of a block of 128, as a byte of a block of 32: all blocks have one size, but are
// not all square, nor are all codes E5M2. It multiplies NVFP4 whose blocks are rows or square.
bool are_multiplied_in_blocks(const std::vector<NumberFormat>& formats);

}  // namespace transformer_ops
