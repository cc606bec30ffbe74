#include "fuser/casts.h"

#include <algorithm>

#include "fuser/declaration.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

std::optional<DType> compute_dtype(const Analysis& analysis, const Step& step) {
  std::optional<DType> compute;
  for (const int op : step.ops) {
    const auto wanted = analysis.required_dtype(op);
    if (wanted) compute = wanted;
  }
  return compute;
}

bool has_product(const Analysis& analysis, const Step& step) {
  return std::ranges::any_of(step.ops, [&](int op) {
    const OpNode& node = analysis.ops()[op];
    return node.native && declaration(node.kind).dtype == DTypeRule::Parameter;
  });
}

// Does quantize.h round this operand to the dtype of the product, so that it needs no cast? A list
// is rounded in one call, so its tensors have one dtype.
bool is_rounded(const Analysis& analysis, int op, const std::string& name) {
  const OpNode& node = analysis.ops()[op];
  const OpDeclaration& row = declaration(node.kind);
  const std::string operand = row.parameter_of(name);
  if (!analysis.is_quantized(op) || !row.has_operand(operand)) return false;
  if (analysis.key().recipe->of(op).format(operand).is_exact()) return false;
  std::optional<DType> first;
  for (size_t k = 0; k < node.parameters.size(); ++k) {
    if (row.parameter_of(node.parameters[k]) != operand) continue;
    const DType dtype = analysis.parameters(op)[k].dtype;
    if (dtype != first.value_or(dtype)) return false;
    first = dtype;
  }
  return true;
}

// Casts the gamma, beta or bias of a Linear's step whose dtype is not that of the product. Backward
// may read them from slots.
void cast_parameters(const Analysis& analysis, DType compute, Step& step) {
  if (!has_product(analysis, step)) return;
  std::vector<Instruction> casts;
  for (const int op : step.ops) {
    const auto metas = analysis.parameters(op);
    for (size_t k = 0; k < metas.size(); ++k) {
      if (metas[k].is_absent || metas[k].dtype == compute) continue;
      const std::string& name = analysis.ops()[op].parameters[k];
      if (is_rounded(analysis, op, name) || analysis.keeps_dtype(op, name)) continue;
      const Value cast{Kind::Temporary, op, name};
      for (const Kind kind : {Kind::Parameter, Kind::Slot}) {
        const Value parameter{kind, op, name};
        if (replace_argument(step, parameter, cast)) {
          casts.push_back(make_cast(parameter, compute, cast));
        }
      }
    }
  }
  step.instructions.insert(step.instructions.begin(), casts.begin(), casts.end());
}

// Promotes with the gradients of the op's extra outputs, from the caller and from ops that read
// them.
DType promote_extra_grads(const Analysis& analysis, DType dtype, int op) {
  for (int k = 0; k < std::ssize(analysis.ops()[op].extra_outputs); ++k) {
    dtype = promote(dtype, analysis.dtypes()[op]);
    for (const int reader : analysis.readers(op, k)) {
      dtype = promote(dtype, analysis.dtypes()[reader + 1]);
    }
  }
  return dtype;
}

// The dtype of the gradient that a step returns for its main tensor.
DType produced_dtype(const Analysis& analysis, const Step& step) {
  DType produced = compute_dtype(analysis, step).value_or(analysis.dtypes()[step.last() + 1]);
  // A single op returns its main gradient's dtype; a fused op adds before it rounds.
  if (step.ops.size() == 1) return produced;
  for (const int op : step.ops) produced = promote_extra_grads(analysis, produced, op);
  return produced;
}

// Null if the step does not cast its main tensor.
const Instruction* find_input_cast(const Step& step) {
  const auto cast = std::ranges::find_if(step.instructions, [&](const Instruction& instruction) {
    return instruction.target == kCast &&
           instruction.arguments[0] == Argument(Value{Kind::Main, step.first()});
  });
  return cast == step.instructions.end() ? nullptr : &*cast;
}

}  // namespace

bool replace_argument(Step& step, const Value& from, const Value& to) {
  bool found = false;
  for (Instruction& instruction : step.instructions) {
    for_each_value(instruction.arguments, [&](Value& value) {
      if (value != from) return;
      value = to;
      found = true;
    });
  }
  return found;
}

Instruction make_cast(const Argument& from, DType dtype, const Value& to) {
  return {.target = kCast, .arguments = {from, Attribute(to_text(dtype))}, .results = {to}};
}

void add_forward_casts(const Analysis& analysis, Step& step) {
  const auto compute = compute_dtype(analysis, step);
  if (!compute) return;
  cast_parameters(analysis, *compute, step);
  if (analysis.dtypes()[step.first()] == *compute) return;
  const Value input{Kind::Main, step.first()}, cast{Kind::Temporary, step.first(), "input"};
  replace_argument(step, input, cast);
  for (Save& save : step.saves) {
    if (save.source == input) save.source = cast;
  }
  step.instructions.insert(step.instructions.begin(), make_cast(input, *compute, cast));
}

void add_backward_casts(const Analysis& analysis, Step& step) {
  const auto compute = compute_dtype(analysis, step);
  if (compute) cast_parameters(analysis, *compute, step);
  const DType wanted = analysis.dtypes()[step.first()];
  if (wanted == DType::Unknown || produced_dtype(analysis, step) == wanted) return;
  const Value gradient{Kind::Grad, step.first()};
  const Value produced{Kind::Temporary, step.first(), "grad_input"};
  for (Instruction& instruction : step.instructions) {
    const auto result = std::ranges::find(instruction.results, Result(gradient));
    if (result == instruction.results.end()) continue;
    *result = produced;
    step.instructions.push_back(make_cast(produced, wanted, gradient));
    return;
  }
}

std::optional<DType> input_cast(const Step& step) {
  const Instruction* const cast = find_input_cast(step);
  if (cast == nullptr) return std::nullopt;
  return parse_dtype(std::get<std::string>(std::get<Attribute>(cast->arguments[1])));
}

Value taken_input(const Step& step) {
  const Instruction* const cast = find_input_cast(step);
  return cast != nullptr ? std::get<Value>(cast->results[0]) : Value{Kind::Main, step.first()};
}

}  // namespace transformer_ops
