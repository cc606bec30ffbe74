#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fuser/analysis.h"
#include "fuser/declaration.h"
#include "fuser/plan.h"

namespace transformer_ops {

// What a call that rounds an operand depends on, beside the operand.
struct RoundingCase {
  NumberFormat format;
  bool by_given_scale = false;  // a state of the op, under delayed scaling
  bool as_codes = false;        // for a product that multiplies codes by scales of blocks
  bool with_scale = false;      // values of codes, and the scale of the tensor beside them
  bool in_groups = false;       // of rows, each of which is a tensor of its own
  bool sums_rows = false;       // the product sums over the rows of the operand
  bool is_stochastic = false;
  bool is_saved = false;  // backward rounds what forward has saved
};
// The op that rounds in such a case.
std::string rounding_target(const RoundingCase& rounding);

// Which operand of a product is meant, and which rounding of it: the gradient may have two.
struct RoundedOperand {
  std::string name;
  std::string use = {};
};

// Makes the calls that round the operands of one op of a plan as its recipe says.
class RoundOperands {
 public:
  // `boundary`: of the gradient that the step takes. `dtype`: in which operands are exact.
  RoundOperands(const Analysis& analysis, int op, int boundary, OperandFormats formats, DType dtype)
      : analysis_(analysis),
        op_(op),
        boundary_(boundary),
        formats_(formats),
        row_(declaration(analysis.ops()[op].kind)),
        records_(analysis.key().grad_enabled),
        dtype_(dtype) {}

  const OperandFormats& formats() const { return formats_; }
  // How many rows each group has, of a product of groups.
  void set_splits(std::optional<Argument> splits) { splits_ = std::move(splits); }
  const std::optional<Argument>& splits() const { return splits_; }
  // The operands of the product whose codes a GPU may multiply, with one scale each.
  void set_operands(std::vector<std::string> operands);
  // Whether the product multiplies codes with a scale for each of their blocks.
  void set_blocks(bool has_blocks) { has_blocks_ = has_blocks; }

  // One call, which rounds `from` to `to`.
  Instruction call(const std::string& operand, const Argument& from, NumberFormat format,
                   const Result& to, bool is_saved) const;

  // The operand as the product takes it: the same calls are made once for each use.
  Argument rounded(const RoundedOperand& operand, const Argument& from, NumberFormat format,
                   std::vector<Instruction>& code) const;
  // The same of a tensor that forward has saved: the gradient keeps a compiler from rounding it
  // there, and from keeping the result.
  Argument rounded_again(const std::string& operand, const Argument& from, NumberFormat format,
                         std::vector<Instruction>& code) const;
  // The same numbers after a Hadamard transform along the sum of the weight's gradient.
  Value transformed(const std::string& operand, const Argument& from,
                    std::vector<Instruction>& code) const;

  // Does the product take a scale beside the operand?
  bool has_scale(const std::string& operand) const;
  // Has a product that was given rounded operands multiply by their scales, too.
  void take_scales(Instruction& product, const RoundedOperand& left,
                   const RoundedOperand& right) const;

  Value temporary(const std::string& name) const { return {Value::Kind::Temporary, op_, name}; }
  Value gradient() const { return {Value::Kind::Grad, boundary_}; }

 private:
  Instruction call_by_given_scale(const std::string& operand, const Argument& from,
                                  const Result& to, const RoundingCase& rounding) const;
  void add_calls(const std::string& operand, const Argument& from, NumberFormat format,
                 const Result& to, bool is_saved, std::vector<Instruction>& code) const;
  Result places(const RoundedOperand& operand, const Argument& from) const;
  Argument rows_of(const std::string& operand) const;
  std::string rounded_dtype(NumberFormat format) const;

  const Analysis& analysis_;
  int op_;
  int boundary_;
  OperandFormats formats_;
  const OpDeclaration& row_;
  bool records_;  // largest magnitudes, for the scales of later calls
  DType dtype_;
  std::optional<Argument> splits_ = {};
  bool takes_codes_ = false;  // of one scale, instead of their values
  bool has_blocks_ = false;
};

}  // namespace transformer_ops
