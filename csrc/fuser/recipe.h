#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "fuser/number_format.h"

namespace transformer_ops {

// How numbers are rounded: to the nearest number of the format, or up or down at random with the
// right mean.
enum class Rounding : uint8_t { Nearest, Stochastic };

// What happens to both operands of a product along its sum before rounding. A Hadamard transform
// does not change the product, but spreads outliers over their block.
enum class Transform : uint8_t { None, Hadamard };

// The formats of the operands of a product y = x W^T. A format whose blocks are parts of a row is
// for operands that are summed along their rows. Operands that are summed along their columns use
// the format's column version.
struct OperandFormats {
  NumberFormat input = {};
  NumberFormat weight = {};
  NumberFormat grad_output = {};
  // applies to the input and the gradient, for the gradient of the weight
  Transform transform = Transform::None;
  // The rounding of the gradient. The other operands are rounded to nearest.
  Rounding rounding = Rounding::Nearest;
  // The number of calls whose largest magnitudes determine the scales, which are states of the op
  // then; 0 if the scales come from the tensors themselves.
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
  std::map<int, OperandFormats> ops = {};  // the formats of single ops
  // The number of a recipe that the host language evaluates for each op, or -1.
  int64_t custom = -1;

  const OperandFormats& of(int op) const;
  bool has_delayed() const;  // Does any op have delayed scaling?
  bool operator==(const Recipe&) const = default;
};

// The text of a recipe: "mx e4m3, mx e4m3, mx e5m2" in the order of the fields, with "exact" for an
// empty one, then ", hadamard" and ", stochastic" if set, and ", delayed 16" for scales from a
// history of that length. "; 3: exact, exact, exact" follows for each single op. A recipe of the
// host language is "custom 7".
std::string to_text(const Recipe& recipe);
// The recipe of a text, which lives as long as the library. Equal texts give equal pointers. Throws
// PlanError for an unknown format, and for a wrong number of formats.
const Recipe* recipe_of(const std::string& text);

}  // namespace transformer_ops
