#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fuser/dtype.h"

namespace transformer_ops {

// The formats (kernels/format.h) in which a product y = x W^T takes its operands; empty for one
// that is taken as it is. A format whose blocks are parts of a row is for operands that are summed
// along their rows; what is summed along its columns takes the format of its columns.
struct OperandFormats {
  std::string input = {};
  std::string weight = {};
  std::string grad_output = {};
  // For the gradient of the weight, input and gradient are first turned by a Hadamard transform
  // along the sum, which leaves the product as it is and spreads outliers over their block.
  bool transforms = false;
  // The gradient is rounded up or down at random, so that its mean is kept.
  bool is_stochastic = false;
  // How many calls' largest magnitudes the scales of the operands, states of the op, come from;
  // 0 where a scale comes from the tensor itself.
  int64_t history = 0;

  // That of an operand by its name in a schema.
  const std::string& format(const std::string& operand) const;
  bool is_delayed() const { return history > 0; }
  bool is_exact() const { return input.empty() && weight.empty() && grad_output.empty(); }
  bool operator==(const OperandFormats&) const = default;
};

struct Recipe {
  OperandFormats all = {};
  std::map<int, OperandFormats> ops = {};  // those of single ops
  // The number of a recipe that the host language has to ask about each op; else -1.
  int64_t custom = -1;

  const OperandFormats& of(int op) const;
  bool has_delayed() const;  // scales, of any op
  bool operator==(const Recipe&) const = default;
};

// "mx e4m3, mx e4m3, mx e5m2" in the order of the fields, "exact" for an empty one, then
// ", hadamard" and ", stochastic" where those are wanted, ", delayed 16" for scales from a history
// of that length; behind them "; 3: exact, exact, exact" for each single op. "custom 7" for one of
// the host language.
std::string to_text(const Recipe& recipe);
// The one recipe of a text, which lives as long as the library: equal texts give equal pointers.
// Throws PlanError for an unknown format, and for another number of them.
const Recipe* recipe_of(const std::string& text);

// The same format with blocks that are parts of a column; a format whose blocks are neither as it
// is.
std::string column_format(const std::string& format);

// Has a format one scale of the whole tensor, beside those of blocks or alone?
bool has_tensor_scale(const std::string& format);
// The largest number of a format's codes; 0 of the empty one.
float largest_number(const std::string& format);
// The format of that largest number which has one scale for a tensor, any float; empty where there
// is none.
std::string format_of_tensor(float largest);

// The rows of a block of a format; 0 where a number depends on the whole tensor, and for a name
// that is none.
int64_t rows_of_block(std::string_view format);
// Has a format one scale for a tensor, and no others? No for a name that is none.
bool has_one_scale(std::string_view format);

// The dtype of the codes of a format with that scale alone; empty for others.
std::string codes_dtype(const std::string& format);

// Does a GPU multiply codes of these formats? Those with a power of two as the scale of each block,
// in float32 of one of 128, as a byte of one of 32: all blocks of one size, but not all square, nor
// all codes E5M2. Those of NVFP4 whose blocks are rows or square.
bool are_multiplied_in_blocks(const std::vector<std::string>& formats);
// Of 4 bits, two in a byte.
bool has_pairs_of_codes(const std::string& format);

// The dtype in which numbers of a format are exact, and products of them may be computed whose
// result is `wanted`. `scalable`: the product takes a scale of the whole tensor beside the numbers.
DType operand_dtype(const std::string& format, DType wanted, bool scalable);

// A format in keys: its number, from 1; 0 is none. Throws PlanError for an unknown name.
uint8_t format_number(const std::string& name);
std::string format_name(uint8_t number);

}  // namespace transformer_ops
