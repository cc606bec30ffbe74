// The gated linear units as rows, for the basic ops and the fused ops that contain one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fuser/rule.h"
#include "kernels/cpu.h"
#include "op/typed_op.h"

namespace transformer_ops {

struct GluRow {
  std::string kind;  // of the op
  std::string name;  // of the typed op, and as an attribute of fused ops
  std::string formula;
  cpu::GluKind glu;
  // Numbers the op takes, by the names that schema and module share.
  std::vector<std::string> attributes;
  Tensor (*unfused)(const Tensor& gate, const Tensor& linear, const cpu::Glu& glu);
};

const std::vector<GluRow>& glus();
// That argument i names; raises where it names none.
const GluRow& glu_of(const Args& args, size_t i);
const GluRow& glu_of_kind(std::string_view kind);
std::vector<std::string> glu_kinds();

// The row's attributes, which the call takes from argument `first` on, and the text of these
// arguments in its schema.
cpu::Glu read_glu(const GluRow& row, const Args& args, size_t first);
std::string schema_of_attributes(const GluRow& row);

// Of any row: the arguments that fused ops take for it, from argument `first` on, and how they are
// bound to op k of a match.
inline constexpr const char* kGluArguments =
    "str glu, int glu_interleave_size, float beta1, float beta2, float limit, float alpha, "
    "float glu_linear_offset";
cpu::Glu read_any_glu(const Args& args, size_t first);
Bindings bind_glu(const Match& match, int k);

// The result for a tensor of twice the width. Raises where the width or a number does not fit.
TensorSpec glu_output(const Args& args, const char* name, const TensorSpec& input,
                      const cpu::Glu& glu);

Tensor glu_unfused(const GluRow& row, const Tensor& input, const cpu::Glu& glu);
void glu_forward_cpu(const cpu::Glu& glu, const Tensor& input, const Tensor& output);
void glu_backward_cpu(const cpu::Glu& glu, const Tensor& grad_output, const Tensor& input,
                      const Tensor& grad_input);
void glu_forward_cuda(const cpu::Glu& glu, const Tensor& input, const Tensor& output);
void glu_backward_cuda(const cpu::Glu& glu, const Tensor& grad_output, const Tensor& input,
                       const Tensor& grad_input);

}  // namespace transformer_ops
