// The gated linear units as table rows, for the basic ops and the fused ops that contain one.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "fuser/rule.h"
#include "kernels/cpu.h"
#include "op/typed_op.h"

namespace transformer_ops {

// A numeric argument of an op, with its name in schema and module.
struct GluAttribute {
  std::string name;
  std::variant<int64_t cpu::Glu::*, double cpu::Glu::*> field;
};

struct GluRow {
  std::string kind;  // the kind of the op
  std::string name;  // the name of the typed op, and an attribute of fused ops
  std::string formula;
  cpu::GluKind glu;
  std::vector<GluAttribute> attributes;
  Tensor (*decomposition)(const Tensor& gate, const Tensor& linear, const cpu::Glu& glu);
};

const std::vector<GluRow>& glus();

// Sets the row's numbers, in its order, and their text in a schema: ", int glu_interleave_size".
template <typename... Numbers>
cpu::Glu glu_with(const GluRow& row, Numbers... numbers) {
  cpu::Glu glu{row.glu};
  [[maybe_unused]] auto next = row.attributes.begin();
  ((glu.*std::get<Numbers cpu::Glu::*>((next++)->field) = numbers), ...);
  return glu;
}
std::string schema_of_attributes(const GluRow& row);
std::vector<std::string> names_of_attributes(const GluRow& row);

const GluRow& glu_of_kind(std::string_view kind);
std::vector<std::string> glu_kinds();

// The arguments of fused ops for any row, their text in schemas, and their binding to op k of a
// match.
struct GluArguments {
  std::string_view glu;
  int64_t glu_interleave_size;
  double beta1, beta2, limit, alpha, glu_linear_offset;
};
inline constexpr const char* kGluArguments =
    "str glu, int glu_interleave_size, float beta1, float beta2, float limit, float alpha, "
    "float glu_linear_offset";
Bindings bind_glu(const Match& match, int k);
// Defaults for the numbers that a row does not have.
Bindings default_glu_bindings();

template <>
struct BodyParameter<const GluArguments&> {
  static constexpr char kSchema[] = "str, int, float, float, float, float, float",
                        kName[] = "const GluArguments&";
  static constexpr size_t kCount = 7;
  static GluArguments get(c10::IValue& first);
};

// They raise if there is no row of that name.
const GluRow& glu_of(const Checks& check, const GluArguments& arguments);
cpu::Glu read_glu(const Checks& check, const GluArguments& arguments);

// The result for a tensor of twice the width. Raises if the width or a number does not fit.
TensorSpec glu_output(const Checks& check, const char* name, const TensorSpec& input,
                      const cpu::Glu& glu);

Tensor glu_decomposed(const GluRow& row, const Tensor& input, const cpu::Glu& glu);
void glu_forward_cpu(const cpu::Glu& glu, const Tensor& input, const Tensor& output);
void glu_backward_cpu(const cpu::Glu& glu, const Tensor& grad_output, const Tensor& input,
                      const Tensor& grad_input);
void glu_forward_cuda(const cpu::Glu& glu, const Tensor& input, const Tensor& output);
void glu_backward_cuda(const cpu::Glu& glu, const Tensor& grad_output, const Tensor& input,
                       const Tensor& grad_input);

}  // namespace transformer_ops
