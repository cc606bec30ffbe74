#include "fuser/quantize.h"

#include <algorithm>
#include <array>
#include <set>

#include "fuser/casts.h"
#include "fuser/declaration.h"
#include "fuser/round_operands.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

constexpr const char* kDecode = "dequantize";
constexpr const char* kDecodeSaved = "dequantize.saved";

// The first of these ops that takes rounded operands, or rounds; -1 if there is none. An absent op
// of a match is negative.
int quantized_op(const Analysis& analysis, const std::vector<int>& ops) {
  const auto found =
      std::ranges::find_if(ops, [&](int op) { return op >= 0 && analysis.is_quantized(op); });
  return found == ops.end() ? -1 : *found;
}

const OpDeclaration& row_of(const Analysis& analysis, int op) {
  return declaration(analysis.ops()[op].kind);
}

// The formats of the recipe. A parameter that is stored quantized is not rounded.
OperandFormats formats_of(const Analysis& analysis, int op) {
  OperandFormats formats = analysis.key().recipe->of(op);
  if (!analysis.parameter_format(op, "weight").is_exact()) formats.weight = {};
  return formats;
}

// Does the call decode a parameter? decode_parameters() makes such calls.
bool is_decoding(const Instruction& instruction) {
  return instruction.target == kDecode || instruction.target == kDecodeSaved;
}

bool is_product(const OpDeclaration& row) { return !row.forward_schema.empty(); }

class Quantize {
 public:
  Quantize(const Analysis& analysis, Step& step, int op)
      : row_(row_of(analysis, op)),
        attributes_(analysis.ops()[op].attributes),
        dtype_(is_product(row_) ? analysis.operand_dtype(op) : analysis.compute_dtype(op)),
        compute_(analysis.compute_dtype(op)),
        operands_(analysis, op, step.last() + 1, formats_of(analysis, op), dtype_),
        analysis_(analysis),
        op_(op),
        step_(step) {}

  // ---- ops that are not products

  // Rounds the step's output, as an operand of that name.
  void round_main(const std::string& operand) {
    const NumberFormat format = formats().format(operand);
    if (!std::get<bool>(attributes_.at("rounds_" + operand)) || format.is_exact()) return;
    for (Instruction& call : step_.instructions) {
      if (!call.target.empty()) continue;
      call = operands_.call(operand, call.arguments[0], format, call.results[0],
                            /*is_saved=*/false);
    }
  }

  // ---- products

  void forward() {
    operands_.set_operands({"input", "weight"});
    operands_.set_blocks(analysis_.has_blocks(op_, {"input", "weight"}));
    const auto call = find_call();
    Instruction product = *call;
    operands_.set_splits(splits_of(product, row_.forward_schema));
    std::vector<Instruction> code;
    const Schema& schema = row_.forward_schema;
    for (const std::string& operand : row_.operands) {
      const int k = place_of(product, schema, operand);
      const NumberFormat format = formats().format(operand);
      if (format.is_exact() && dtype_ == compute_) continue;
      product.arguments[k] = operands_.rounded({operand}, product.arguments[k], format, code);
    }
    operands_.take_scales(product, {"input"}, {"weight"});
    if (dtype_ == compute_) {
      code.push_back(std::move(product));
    } else {
      widen_arguments(product, code);
      widen_results(std::move(product), code);
    }
    replace(call, std::move(code));
  }

  void backward(const Schema& schema) {
    const bool is_stochastic = formats().rounding == Rounding::Stochastic;
    const bool is_plain = !is_stochastic && !transforms();
    if (!is_stochastic) operands_.set_operands({"input", "weight", "grad_output"});
    // Pairs of codes may be rounded at random; the gradient is then rounded separately for each
    // product.
    const bool are_pairs = formats().grad_output.has_pairs_of_codes();
    const bool fits = are_pairs ? follows_the_sum() : is_plain;
    operands_.set_blocks(fits && analysis_.has_blocks(op_, {"input", "weight", "grad_output"}));
    const auto call = find_call();
    const Instruction whole = *call;
    const auto mask = std::get<std::vector<bool>>(
        std::get<Attribute>(whole.arguments[schema_place(schema, "output_mask")]));
    operands_.set_splits(splits_of(whole, schema));
    std::vector<Instruction> code;
    for (const std::vector<bool>& part : parts_of(mask)) one_call(whole, schema, part, code);
    replace(call, std::move(code));
  }

 private:
  // ---- the call of the product

  // The masks of the calls that backward needs. The gradients of x and W share a call if one
  // rounding serves both and neither has its own scale. What is not multiplied (a bias) uses the
  // exact gradient.
  std::vector<std::vector<bool>> parts_of(const std::vector<bool>& mask) const {
    std::vector<std::vector<bool>> parts;
    for (size_t k = 0; k < mask.size(); ++k) {
      if (!mask[k]) continue;
      const bool joins =
          k == 1 ? mask[0] && !follows_the_sum() && !has_scales() : k > 2 && mask[k - 1];
      if (!joins) parts.emplace_back(mask.size(), false);
      parts.back()[k] = true;
    }
    return parts;
  }

  static bool multiplies(const std::vector<bool>& mask) {
    return mask[0] || (mask.size() > 1 && mask[1]);
  }

  // The numbers of rows of the groups, if the product has groups.
  std::optional<Argument> splits_of(const Instruction& call, const Schema& schema) const {
    if (!row_.has_extra_input("splits")) return std::nullopt;
    return call.arguments[schema_place(schema, "splits")];
  }

  std::vector<Instruction>::iterator find_call() {
    return std::ranges::find_if(step_.instructions, [](const Instruction& instruction) {
      return !instruction.target.empty() && instruction.target != kCast &&
             !is_decoding(instruction);
    });
  }

  void replace(std::vector<Instruction>::iterator call, std::vector<Instruction> code) {
    const auto next = step_.instructions.erase(call);
    step_.instructions.insert(next, std::make_move_iterator(code.begin()),
                              std::make_move_iterator(code.end()));
  }

  static int schema_place(const Schema& schema, const std::string& name) {
    const auto field = std::ranges::find(schema.arguments, name, &Schema::Field::name);
    return static_cast<int>(field - schema.arguments.begin());
  }

  // Finds an operand of a call by its name in the op's own schema. A fused call has the operand
  // where it reads the same tensor.
  int place_of(const Instruction& call, const Schema& schema, const std::string& operand) const {
    if (call.target == schema.name) return schema_place(schema, operand);
    // For a list, the first tensor decides.
    const std::string name = row_.tensors_of(operand, attributes_).front();
    const Value cast = operands_.temporary(name);
    const Value own =
        operand == "input" ? Value{Kind::Main, step_.first()} : Value{Kind::Parameter, op_, name};
    const auto found = std::ranges::find_if(call.arguments, [&](const Argument& argument) {
      const auto* const list = std::get_if<ValueList>(&argument);
      const Argument first = list == nullptr ? argument : list->front();
      return first == Argument(own) || first == Argument(cast);
    });
    return static_cast<int>(found - call.arguments.begin());
  }

  // ---- operands

  const OperandFormats& formats() const { return operands_.formats(); }
  bool transforms() const { return formats().transform == Transform::Hadamard; }

  bool has_scales() const {
    return operands_.has_scale("input") || operands_.has_scale("weight") ||
           operands_.has_scale("grad_output");
  }

  // Casts the call's other arguments, such as a bias or a residual, to the dtype of the product.
  // The operands are temporaries by now, and group sizes stay integers.
  void widen_arguments(Instruction& call, std::vector<Instruction>& code) const {
    for (Argument& argument : call.arguments) {
      if (argument == operands_.splits()) continue;
      std::array<Argument, 1> found = {argument};
      for_each_value(found, [&](Value& value) {
        const bool is_beside = value.kind == Kind::Parameter || value.kind == Kind::ExtraInput ||
                               value.kind == Kind::ExtraOutput;
        if (!is_beside) return;
        const Value wide{Kind::Temporary, value.op, "wide_" + value.name};
        code.push_back(make_cast(value, dtype_, wide));
        value = wide;
      });
      argument = found[0];
    }
  }

  // Adds the call, and casts of its results to their dtypes without a recipe. A saved mask is not
  // cast.
  void widen_results(Instruction call, std::vector<Instruction>& code) const {
    std::vector<Instruction> casts;
    for (Result& result : call.results) {
      auto* const value = std::get_if<Value>(&result);
      if (value == nullptr) continue;
      const bool is_input = value->kind == Kind::Slot && value->name == "input";
      if (value->kind != Kind::Main && !(is_input && is_saved(*value))) continue;
      const Value wide = operands_.temporary(is_input ? "wide_kept" : "output");
      casts.push_back(make_cast(wide, compute_, *value));
      *value = wide;
    }
    code.push_back(std::move(call));
    code.insert(code.end(), casts.begin(), casts.end());
  }

  bool is_saved(const Value& slot) const {
    return std::ranges::find(step_.saves, slot, &Save::slot) != step_.saves.end();
  }

  bool is_operand(const std::string& name) const {
    return std::ranges::find(row_.operands, name) != row_.operands.end();
  }

  // Do the blocks of the gradient's format follow the sum?
  bool follows_the_sum() const {
    return formats().grad_output.of_columns() != formats().grad_output;
  }

  // Names one of the two roundings of the gradient.
  std::string use_of_gradient(bool wants_input) const {
    const bool is_one = !follows_the_sum() && !transforms();
    return wants_input || is_one ? "" : "_columns";
  }

  // Adds the call for the gradients of the mask. The gradient of x sums over the columns of W; that
  // of W sums over the rows of the gradient and of x.
  void one_call(Instruction call, const Schema& schema, const std::vector<bool>& mask,
                std::vector<Instruction>& code) const {
    const bool wants_input = mask[0], is_transformed = transforms() && !wants_input;
    for (size_t k = 0; k < schema.arguments.size(); ++k) {
      const std::string& name = schema.arguments[k].name;
      Argument& argument = call.arguments[k];
      if (name == "output_mask") {
        argument = Attribute(mask);
      } else if (!multiplies(mask)) {
        if (is_operand(name)) argument = None{};
      } else if (name == "grad_output") {
        const NumberFormat own = formats().grad_output;
        const NumberFormat format = wants_input ? own : own.of_columns();
        if (is_transformed) argument = operands_.transformed(name, argument, code);
        if (!format.is_exact() || dtype_ != compute_) {
          argument =
              operands_.rounded({name, use_of_gradient(wants_input)}, argument, format, code);
        }
      } else if (schema.arguments[k].may_be_absent() && !is_read(name, mask)) {
        argument = None{};
      } else if (is_operand(name)) {
        const NumberFormat format = formats().format(name);
        if (!format.is_exact() || dtype_ != compute_) {
          if (is_transformed) argument = operands_.transformed(name, argument, code);
          argument = operands_.rounded_again(name, argument, format.of_columns(), code);
        }
      }
    }
    if (multiplies(mask)) {
      operands_.take_scales(call, {"grad_output", use_of_gradient(wants_input)},
                            {wants_input ? "weight" : "input"});
    }
    std::optional<Instruction> narrow;
    for (size_t k = 0; k < mask.size(); ++k) {
      if (!mask[k]) call.results[k] = unused_like(call.results[k]);
    }
    if (wants_input && dtype_ != compute_) {
      narrow = make_cast(operands_.temporary("wide_grad_input"), compute_,
                         std::get<Value>(call.results[0]));
      call.results[0] = operands_.temporary("wide_grad_input");
    }
    code.push_back(std::move(call));
    if (narrow) code.push_back(std::move(*narrow));
  }

  // The gradient of an extra output is added to that of x. Other arguments are read as in the op's
  // own backward.
  bool is_read(const std::string& name, const std::vector<bool>& mask) const {
    return name.starts_with("grad_") ? mask[0] : row_.is_read(name, mask);
  }

  const OpDeclaration& row_;
  const Attributes& attributes_;
  DType dtype_;    // the dtype in which operands of a product are exact
  DType compute_;  // the dtype of the op without a recipe
  RoundOperands operands_;
  const Analysis& analysis_;
  int op_;
  Step& step_;
};

Value with_part(Value parameter, Value::Part part) {
  parameter.part = part;
  return parameter;
}

Instruction decode(const Analysis& analysis, const Value& parameter) {
  const NumberFormat format = analysis.parameter_format(parameter.op, parameter.name);
  return {.target = kDecode,
          .arguments = {with_part(parameter, Value::Part::Codes),
                        with_part(parameter, Value::Part::Scale), Attribute(format.name()),
                        Attribute(to_text(analysis.compute_dtype(parameter.op))), None{}},
          .results = {Value{Kind::Temporary, parameter.op, parameter.name}}};
}

bool has_scaled_operand(const Analysis& analysis, int op) {
  return analysis.has_scale(op, "input") || analysis.has_scale(op, "weight") ||
         analysis.has_blocks(op, {"input", "weight"});
}

}  // namespace

Instruction decode_again(const Analysis& analysis, const Value& parameter, const Value& gradient) {
  Instruction call = decode(analysis, parameter);
  call.target = kDecodeSaved;
  call.arguments.insert(call.arguments.begin(), gradient);
  return call;
}

void decode_parameters(const Analysis& analysis, Pass pass, Step& step) {
  std::vector<Instruction> code;
  for (const int op : step.ops) {
    for (const std::string& name : analysis.ops()[op].parameters) {
      if (analysis.parameter_format(op, name).is_exact()) continue;
      const Value parameter{Kind::Parameter, op, name}, decoded{Kind::Temporary, op, name};
      const bool is_argument = replace_argument(step, parameter, decoded);
      const bool is_slot = replace_argument(step, {Kind::Slot, op, name}, decoded);
      if (!is_argument && !is_slot) continue;
      code.push_back(pass == Pass::Forward
                         ? decode(analysis, parameter)
                         : decode_again(analysis, parameter, {Kind::Grad, step.last() + 1}));
    }
  }
  step.instructions.insert(step.instructions.begin(), code.begin(), code.end());
}

void quantize_forward(const Analysis& analysis, Step& step) {
  const int op = quantized_op(analysis, step.ops);
  if (op < 0) return;
  Quantize quantize(analysis, step, op);
  if (is_product(row_of(analysis, op))) return quantize.forward();
  quantize.round_main("input");
}

void quantize_backward(const Analysis& analysis, const Schema& schema, Step& step) {
  const int op = quantized_op(analysis, step.ops);
  if (op < 0 || step.skipped || step.instructions.empty()) return;
  Quantize quantize(analysis, step, op);
  if (is_product(row_of(analysis, op))) return quantize.backward(schema);
  quantize.round_main("grad_output");
}

void list_states(Plan& plan) {
  std::set<Value> found;
  const auto add = [&](const Value& value) {
    const auto end = std::end(kScaleStates);
    const bool is_scale = std::find(std::begin(kScaleStates), end, value.name) != end;
    if (value.kind == Kind::State && is_scale) found.insert(value);
  };
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    for (const Step& step : *steps) {
      if (step.skipped) continue;
      for (const Instruction& instruction : step.instructions) {
        for_each_value(instruction.arguments, add);
        for_each_value(instruction.results, add);
      }
    }
  }
  plan.states.assign(found.begin(), found.end());
}

std::optional<std::string> quantized_product(const Match& match) {
  const int op = quantized_op(match.analysis, match.places);
  if (op < 0) return std::nullopt;
  return "op " + std::to_string(op) + " takes rounded operands";
}

std::optional<std::string> quantized_product(const Match& match, const Rule& rule) {
  const Analysis& analysis = match.analysis;
  const int op = quantized_op(analysis, match.places);
  if (op < 0) return std::nullopt;
  const bool is_forward = rule.pass == Pass::Forward && op == match.first();
  const bool is_backward = rule.pass == Pass::Backward && rule.under_recipe != UnderRecipe::Refused;
  if (!is_forward && !is_backward) return quantized_product(match);
  if (rule.scalable || rule.under_recipe == UnderRecipe::EachCall) return std::nullopt;
  const std::string place = "op " + std::to_string(op);
  const DType dtype = analysis.operand_dtype(op);
  if (dtype != analysis.compute_dtype(op)) {
    return place + " computes in " + to_text(dtype) + " from rounded operands";
  }
  if (!has_scaled_operand(analysis, op)) return std::nullopt;
  return place + " takes operands with a scale beside them";
}

}  // namespace transformer_ops
