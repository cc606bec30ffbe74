#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fuser/analysis.h"
#include "fuser/declaration.h"
#include "fuser/plan.h"

namespace transformer_ops {

// An operand of a product, and one of its roundings: the gradient may have two.
struct RoundedOperand {
  std::string name;
  std::string use = {};
};

// Makes the calls that round the operands of an op according to its recipe.
class RoundOperands {
 public:
  // `boundary`: that of the step's gradient. `dtype`: one in which operands are exact.
  RoundOperands(const Analysis& analysis, int op, int boundary, OperandFormats formats, DType dtype)
      : analysis_(analysis),
        op_(op),
        boundary_(boundary),
        formats_(formats),
        row_(declaration(analysis.ops()[op].kind)),
        records_(analysis.key().grad_enabled),
        dtype_(dtype) {}

  const OperandFormats& formats() const { return formats_; }
  // Sets the group sizes of a product with groups.
  void set_splits(std::optional<Argument> splits) { splits_ = std::move(splits); }
  const std::optional<Argument>& splits() const { return splits_; }
  // Sets the operands that must all have one scale and FP8 codes, so that a GPU can multiply codes.
  void set_operands(std::vector<std::string> operands);
  // Sets whether the product multiplies codes with block scales.
  void set_blocks(bool has_blocks) { has_blocks_ = has_blocks; }

  // Makes a call that rounds `from` to `to`.
  Instruction call(const std::string& operand, const Argument& from, NumberFormat format,
                   const Result& to, bool is_saved) const;

  // Adds the calls that round an operand, once for each use, and returns the rounded value.
  Argument rounded(const RoundedOperand& operand, const Argument& from, NumberFormat format,
                   std::vector<Instruction>& code) const;
  // The same for a tensor that forward has saved. The gradient argument prevents a compiler from
  // rounding it in forward and saving the result.
  Argument rounded_again(const std::string& operand, const Argument& from, NumberFormat format,
                         std::vector<Instruction>& code) const;
  // The operand after a Hadamard transform along the sum of the weight's gradient.
  Value transformed(const std::string& operand, const Argument& from,
                    std::vector<Instruction>& code) const;

  // Does the product take a separate scale for the operand?
  bool has_scale(const std::string& operand) const;
  // Turns a product of rounded operands into one that also multiplies by their scales.
  void take_scales(Instruction& product, const RoundedOperand& left,
                   const RoundedOperand& right) const;

  Value temporary(const std::string& name) const { return {Value::Kind::Temporary, op_, name}; }
  Value gradient() const { return {Value::Kind::Grad, boundary_}; }

 private:
  std::string target(const std::string& operand, NumberFormat format, bool is_saved) const;
  void add_calls(const std::string& operand, const Argument& from, NumberFormat format,
                 const Result& to, bool is_saved, std::vector<Instruction>& code) const;
  bool is_decoded(const Value& value) const;
  Result places(const RoundedOperand& operand, const Argument& from) const;
  Argument rows_of(const std::string& operand) const;
  std::string rounded_dtype(NumberFormat format) const;

  const Analysis& analysis_;
  int op_;
  int boundary_;
  OperandFormats formats_;
  const OpDeclaration& row_;
  bool records_;  // largest magnitudes are recorded, for the scales of later calls
  DType dtype_;
  std::optional<Argument> splits_ = {};
  bool takes_codes_ = false;  // codes with one scale, instead of their values
  bool has_blocks_ = false;
};

}  // namespace transformer_ops
