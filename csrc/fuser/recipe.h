#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "fuser/number_format.h"

namespace transformer_ops {

// How a number that lies between two of a format becomes one of them: the nearest one, or either of
// them at random, so that the mean is kept.
enum class Rounding : uint8_t { Nearest, Stochastic };

// What happens to both tensors of a product along its sum before they are rounded: nothing, or a
// Hadamard transform, which leaves the product as it is and spreads outliers over their block.
enum class Transform : uint8_t { None, Hadamard };

// In what a product y = x W^T takes its operands. A format whose blocks are parts of a row is for
// operands that are summed along their rows; what is summed along its columns takes the format of
// its columns.
struct OperandFormats {
  NumberFormat input = {};
  NumberFormat weight = {};
  NumberFormat grad_output = {};
  // Of the input and the gradient, for the gradient of the weight.
  Transform transform = Transform::None;
  // Of the gradient. The other operands are rounded to the nearest.
  Rounding rounding = Rounding::Nearest;
  // From how many calls' largest magnitudes the scales of the operands come, which are states of
  // the op then; 0 where a scale comes from the tensor itself.
  int64_t history = 0;

  // The format of an operand by its name in a schema.
  NumberFormat format(const std::string& operand) const;
  bool is_stochastic(const std::string& operand) const {
    return rounding == Rounding::Stochastic && operand == "grad_output";
  }
  bool is_delayed() const { return history > 0; }
  bool is_exact() const { return input.is_exact() && weight.is_exact() && grad_output.is_exact(); }
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

}  // namespace transformer_ops
