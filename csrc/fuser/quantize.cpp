#include "fuser/quantize.h"

#include <algorithm>
#include <array>
#include <set>

#include "fuser/casts.h"
#include "fuser/declaration.h"
#include "fuser/error.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

constexpr const char* kEncode = "quantize";
constexpr const char* kEncodeColumns = "quantize_columns";
constexpr const char* kDecode = "dequantize";
constexpr const char* kDecodeSaved = "decode_saved";
constexpr const char* kRoundGroups = "quantize_dequantize_groups";
constexpr const char* kRoundScaled = "quantize_dequantize_scaled";
constexpr const char* kRoundGroupsScaled = "quantize_dequantize_groups_scaled";
constexpr const char* kRoundStochastic = "quantize_dequantize_stochastic";
constexpr const char* kRoundGroupsStochastic = "quantize_dequantize_groups_stochastic";
constexpr const char* kValues = "quantize_values";
constexpr const char* kValuesStochastic = "quantize_values_stochastic";
constexpr const char* kTransform = "hadamard_columns";
constexpr const char* kTransformGroups = "hadamard_columns_groups";

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

// Of a recipe; a parameter that is held quantized is taken as it is.
OperandFormats formats_of(const Analysis& analysis, int op) {
  OperandFormats formats = analysis.key().recipe->of(op);
  if (!analysis.parameter_format(op, "weight").empty()) formats.weight = "";
  return formats;
}

// Of a parameter, by decode_parameters().
bool is_decoding(const Instruction& instruction) {
  return instruction.target == kDecode || instruction.target == kDecodeSaved;
}

bool is_product(const OpDeclaration& row) { return !row.forward_schema.empty(); }

class Quantize {
 public:
  Quantize(const Analysis& analysis, Step& step, int op)
      : formats_(formats_of(analysis, op)),
        records_(analysis.key().grad_enabled),
        row_(row_of(analysis, op)),
        attributes_(analysis.ops()[op].attributes),
        dtype_(is_product(row_) ? analysis.operand_dtype(op) : analysis.compute_dtype(op)),
        compute_(analysis.compute_dtype(op)),
        analysis_(analysis),
        op_(op),
        step_(step) {}

  // ---- ops that are no product

  // What the step hands on is rounded on the way, as an operand of that name.
  void round_main(const std::string& operand) {
    const std::string& format = formats_.format(operand);
    if (!std::get<bool>(attributes_.at("rounds_" + operand)) || format.empty()) return;
    for (Instruction& call : step_.instructions) {
      if (!call.target.empty()) continue;
      call = rounding_of(operand, call.arguments[0], format, call.results[0], /*is_saved=*/false);
    }
  }

  // ---- products

  void forward() {
    takes_codes_ = may_take_codes({"input", "weight"});
    has_blocks_ = analysis_.has_blocks(op_, {"input", "weight"});
    const auto call = find_call();
    Instruction product = *call;
    splits_ = splits_of(product, row_.forward_schema);
    std::vector<Instruction> code;
    const Schema& schema = row_.forward_schema;
    for (const std::string& operand : row_.operands) {
      const int k = place_of(product, schema, operand);
      if (formats_.format(operand).empty() && dtype_ == compute_) continue;
      product.arguments[k] =
          rounded(operand, product.arguments[k], formats_.format(operand), "", code);
    }
    take_scales(product, {"input"}, {"weight"});
    if (dtype_ == compute_) {
      code.push_back(std::move(product));
    } else {
      widen_arguments(product, code);
      widen_results(std::move(product), code);
    }
    replace(call, std::move(code));
  }

  void backward(const Schema& schema) {
    const bool is_plain = !formats_.is_stochastic && !formats_.transforms;
    takes_codes_ = may_take_codes({"input", "weight", "grad_output"}) && !formats_.is_stochastic;
    // Pairs of codes, which may be rounded at random, have one gradient for each of both products.
    const bool has_pairs = has_pairs_of_codes(formats_.grad_output) && follows_the_sum();
    has_blocks_ = analysis_.has_blocks(op_, {"input", "weight", "grad_output"}) &&
                  (has_pairs || (is_plain && !has_pairs_of_codes(formats_.grad_output)));
    const auto call = find_call();
    const Instruction whole = *call;
    const auto mask = std::get<std::vector<bool>>(
        std::get<Attribute>(whole.arguments[schema_place(schema, "output_mask")]));
    splits_ = splits_of(whole, schema);
    std::vector<Instruction> code;
    for (const std::vector<bool>& part : parts_of(mask)) one_call(whole, schema, part, code);
    replace(call, std::move(code));
  }

 private:
  // ---- the call of the product

  // Masks of the calls that backward needs: the gradients of x and W together where one rounding
  // serves both and neither has a scale of its own, what does not multiply (a bias) by the gradient
  // as it is.
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

  // How many rows each group has, of a product of groups.
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

  // An operand of a call by its name in the op's own schema: a fused call has it where it reads
  // the same tensor.
  int place_of(const Instruction& call, const Schema& schema, const std::string& operand) const {
    if (call.target == schema.name) return schema_place(schema, operand);
    // Of a list, the first.
    const std::string name = row_.tensors_of(operand, attributes_).front();
    const Value cast = temporary(name);
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

  Value temporary(const std::string& name) const { return {Kind::Temporary, op_, name}; }

  // In the place of an operand: where that is a list, one of each of its tensors.
  Result places(const std::string& prefix, const std::string& operand, const std::string& use,
                const Argument& from) const {
    if (!std::holds_alternative<ValueList>(from)) return temporary(prefix + operand + use);
    ValueList list;
    for (const std::string& name : row_.tensors_of(operand, attributes_)) {
      list.push_back(temporary(prefix + name + use));
    }
    return list;
  }

  static Argument taken(const Result& result) {
    if (const auto* const list = std::get_if<ValueList>(&result)) return *list;
    return std::get<Value>(result);
  }

  template <typename Item>
  static ValueList as_list(const Item& item) {
    const auto* const list = std::get_if<ValueList>(&item);
    return list != nullptr ? *list : ValueList{std::get<Value>(item)};
  }

  // A cast of each.
  static void add_casts(const Argument& from, DType dtype, const Result& to,
                        std::vector<Instruction>& code) {
    const ValueList sources = as_list(from), casts = as_list(to);
    for (size_t i = 0; i < sources.size(); ++i) {
      code.push_back(make_cast(sources[i], dtype, casts[i]));
    }
  }

  // Calls that round each; groups are rounded by one call, which takes and gives a list.
  void add_roundings(const std::string& operand, const Argument& from, const std::string& format,
                     const Result& to, bool is_saved, std::vector<Instruction>& code) const {
    const ValueList sources = as_list(from), results = as_list(to);
    const size_t calls = splits_ ? 1 : sources.size();
    const bool has_scales = formats_.is_delayed() && std::holds_alternative<ValueList>(from);
    check(splits_ || !has_scales, "[", row_.kind,
          "] recipe must have no delayed scales, which are those of one weight, got ",
          sources.size(), " weights");
    for (size_t i = 0; i < calls; ++i) {
      Instruction call = splits_ ? rounding_of(operand, sources, format, results, is_saved)
                                 : rounding_of(operand, sources[i], format, results[i], is_saved);
      if (is_saved) call.arguments.insert(call.arguments.begin(), gradient());
      code.push_back(std::move(call));
    }
  }

  Instruction rounding(const Argument& from, const std::string& format, const Result& to,
                       const std::string& target) const {
    return {.target = target,
            .arguments = {from, Attribute(format), Attribute(rounded_dtype(format))},
            .results = {to}};
  }

  Instruction encoding(const std::string& operand, const Argument& from, const std::string& format,
                       const Result& to, bool is_saved) const {
    // What backward takes from forward it sums over rows, and pairs of codes are along the sum.
    const bool sums_rows = is_saved || format != formats_.format(operand);
    std::string target = sums_rows && has_pairs_of_codes(format) ? kEncodeColumns : kEncode;
    if (formats_.is_stochastic && operand == "grad_output") target += "_stochastic";
    return {.target = target + (is_saved ? "_saved" : ""),
            .arguments = {from, Attribute(format)},
            .results = {to, scale_of(std::get<Value>(to))}};
  }

  // Of an operand. Those of groups are rounded group by group.
  Instruction rounding_of(const std::string& operand, const Argument& from,
                          const std::string& format, const Result& to, bool is_saved) const {
    if (formats_.is_delayed()) return scaled_rounding(operand, from, format, to, is_saved);
    if (has_blocks_) return encoding(operand, from, format, to, is_saved);
    const bool has_scale = this->has_scale(operand);
    std::string target = has_scale ? kValues : splits_ ? kRoundGroups : kRoundCall;
    if (is_saved) target += "_saved";
    if (formats_.is_stochastic && operand == "grad_output") {
      target = has_scale ? kValuesStochastic : splits_ ? kRoundGroupsStochastic : kRoundStochastic;
    }
    Instruction call = rounding(from, format, to, target);
    if (splits_) call.arguments.insert(call.arguments.begin() + 1, rows_of(operand));
    if (has_scale) call.results.push_back(scale_of(std::get<Value>(to)));
    return call;
  }

  // ---- scales beside operands

  bool has_scale(const std::string& operand) const {
    return is_product(row_) && (has_blocks_ || analysis_.has_scale(op_, operand));
  }

  bool has_scales() const {
    return has_scale("input") || has_scale("weight") || has_scale("grad_output");
  }

  // A GPU multiplies codes, or decodes them, where both operands are such.
  bool may_take_codes(std::initializer_list<const char*> operands) const {
    return analysis_.key().device == Device::Cuda &&
           std::ranges::all_of(operands, [&](const std::string& operand) {
             return has_scale(operand) && !codes_dtype(formats_.format(operand)).empty();
           });
  }

  std::string rounded_dtype(const std::string& format) const {
    return takes_codes_ ? codes_dtype(format) : to_text(dtype_);
  }

  // Of what an operand was rounded to.
  static Value scale_of(Value rounded) {
    rounded.name += "_scale";
    return rounded;
  }

  // An operand of a product, and which rounding of it.
  struct Use {
    std::string operand;
    std::string use = {};
  };

  // Has a product that was given rounded operands multiply by their scales, too.
  void take_scales(Instruction& product, const Use& left, const Use& right) const {
    if (!has_scale(left.operand) && !has_scale(right.operand)) return;
    product.target += "_scaled";
    for (const auto& [operand, use] : {left, right}) {
      const Value scale = scale_of(temporary("rounded_" + operand + use));
      product.arguments.push_back(has_scale(operand) ? Argument(scale) : Argument(None{}));
    }
  }

  // Of the groups of an operand; the weights are a matrix each.
  Argument rows_of(const std::string& operand) const {
    return operand == "weight" ? Argument(None{}) : *splits_;
  }

  Instruction scaled_rounding(const std::string& operand, const Argument& from,
                              const std::string& format, const Result& to, bool is_saved) const {
    const bool is_gradient = operand == "grad_output";
    const int64_t place = is_gradient ? 2 : operand == "weight" ? 1 : 0;
    const Value scale{Kind::State, op_, kScaleStates[0]};
    const bool has_scale = this->has_scale(operand);
    Instruction call{.target = has_scale ? kRoundValuesScaled
                               : splits_ ? kRoundGroupsScaled
                                         : kRoundScaled,
                     .arguments = {from, scale, Attribute(place)},
                     .results = {to}};
    if (splits_) call.arguments.push_back(rows_of(operand));
    call.arguments.insert(call.arguments.end(),
                          {Attribute(format), Attribute(rounded_dtype(format))});
    if (has_scale) call.results.push_back(scale_of(std::get<Value>(to)));
    if (is_saved) {
      call.target += "_saved";
    } else if (records_) {
      call.results.push_back(Value{Kind::State, op_, kScaleStates[is_gradient ? 2 : 1]});
    } else {
      call.results.push_back(temporary("amax_" + operand));
    }
    return call;
  }

  // The operand as the product takes it; `use` tells two uses of it apart.
  Argument rounded(const std::string& operand, const Argument& from, const std::string& format,
                   const std::string& use, std::vector<Instruction>& code) const {
    const Result to = places("rounded_", operand, use, from);
    if (is_written(to, code)) return taken(to);
    if (format.empty()) {
      add_casts(from, dtype_, to, code);
    } else {
      add_roundings(operand, from, format, to, /*is_saved=*/false, code);
    }
    return taken(to);
  }

  static bool is_written(const Result& result, const std::vector<Instruction>& code) {
    const auto is_same = [&](const Result& each) { return as_list(each) == as_list(result); };
    return std::ranges::any_of(
        code, [&](const Instruction& call) { return std::ranges::any_of(call.results, is_same); });
  }

  // The same numbers turned along the sum of the weight's gradient.
  Value turned(const std::string& operand, const Argument& from,
               std::vector<Instruction>& code) const {
    const Value to = temporary("turned_" + operand);
    code.push_back({.target = kTransform, .arguments = {gradient(), from}, .results = {to}});
    if (splits_) {
      code.back().target = kTransformGroups;
      code.back().arguments.push_back(*splits_);
    }
    return to;
  }

  // The gradient that the step takes.
  Value gradient() const { return {Kind::Grad, step_.last() + 1}; }

  // Casts what the call takes beside its operands, such as a bias or a residual, to the dtype of
  // the product. The operands are temporaries by now, and group sizes stay integers.
  void widen_arguments(Instruction& call, std::vector<Instruction>& code) const {
    for (Argument& argument : call.arguments) {
      if (argument == splits_) continue;
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

  // Adds the call, and casts of its results to the dtype that they have without a recipe. A saved
  // mask has none.
  void widen_results(Instruction call, std::vector<Instruction>& code) const {
    std::vector<Instruction> casts;
    for (Result& result : call.results) {
      auto* const value = std::get_if<Value>(&result);
      if (value == nullptr) continue;
      const bool is_input = value->kind == Kind::Slot && value->name == "input";
      if (value->kind != Kind::Main && !(is_input && is_saved(*value))) continue;
      const Value wide = temporary(is_input ? "wide_kept" : "output");
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

  // The same of a tensor from forward: the gradient keeps a compiler from rounding it there, and
  // from keeping the result.
  Argument rounded_again(const std::string& operand, const Argument& from,
                         const std::string& format, std::vector<Instruction>& code) const {
    const Result to = places("rounded_", operand, "", from);
    if (format.empty()) {
      add_casts(from, dtype_, to, code);
    } else {
      add_roundings(operand, from, format, to, /*is_saved=*/true, code);
    }
    return taken(to);
  }

  // Do the blocks of the gradient's format follow the sum?
  bool follows_the_sum() const {
    return column_format(formats_.grad_output) != formats_.grad_output;
  }

  // Which of two roundings of the gradient is meant.
  std::string use_of_gradient(bool wants_input) const {
    const bool is_one = !follows_the_sum() && !formats_.transforms;
    return wants_input || is_one ? "" : "_columns";
  }

  // The gradients that the mask names: that of x sums over the columns of W, that of W over the
  // rows of the gradient and of x.
  void one_call(Instruction call, const Schema& schema, const std::vector<bool>& mask,
                std::vector<Instruction>& code) const {
    const bool wants_input = mask[0], transforms = formats_.transforms && !wants_input;
    for (size_t k = 0; k < schema.arguments.size(); ++k) {
      const std::string& name = schema.arguments[k].name;
      Argument& argument = call.arguments[k];
      if (name == "output_mask") {
        argument = Attribute(mask);
      } else if (!multiplies(mask)) {
        if (is_operand(name)) argument = None{};
      } else if (name == "grad_output") {
        const std::string format =
            wants_input ? formats_.grad_output : column_format(formats_.grad_output);
        const std::string use = use_of_gradient(wants_input);
        if (transforms) argument = turned(name, argument, code);
        if (!format.empty() || dtype_ != compute_) {
          argument = rounded(name, argument, format, use, code);
        }
      } else if (schema.arguments[k].may_be_absent() && !is_read(name, mask)) {
        argument = None{};
      } else if (is_operand(name)) {
        if (!formats_.format(name).empty() || dtype_ != compute_) {
          if (transforms) argument = turned(name, argument, code);
          argument = rounded_again(name, argument, column_format(formats_.format(name)), code);
        }
      }
    }
    if (multiplies(mask)) {
      take_scales(call, {"grad_output", use_of_gradient(wants_input)},
                  {wants_input ? "weight" : "input"});
    }
    std::optional<Instruction> narrow;
    for (size_t k = 0; k < mask.size(); ++k) {
      if (!mask[k]) call.results[k] = unused_like(call.results[k]);
    }
    if (wants_input && dtype_ != compute_) {
      narrow = make_cast(temporary("wide_grad_input"), compute_, std::get<Value>(call.results[0]));
      call.results[0] = temporary("wide_grad_input");
    }
    code.push_back(std::move(call));
    if (narrow) code.push_back(std::move(*narrow));
  }

  // The gradient of an extra output is added to that of x. All else is read as the op's own
  // backward reads it.
  bool is_read(const std::string& name, const std::vector<bool>& mask) const {
    return name.starts_with("grad_") ? mask[0] : row_.is_read(name, mask);
  }

  const OperandFormats formats_;
  const bool records_;  // largest magnitudes, for the scales of later calls
  const OpDeclaration& row_;
  const Attributes& attributes_;
  DType dtype_;    // in which operands of a product are exact
  DType compute_;  // of the op without a recipe
  const Analysis& analysis_;
  int op_;
  Step& step_;
  std::optional<Argument> splits_ = {};
  bool takes_codes_ = false;  // instead of their values
  bool has_blocks_ = false;   // of codes, with a scale each
};

bool has_scaled_operand(const Analysis& analysis, int op) {
  return analysis.has_scale(op, "input") || analysis.has_scale(op, "weight") ||
         analysis.has_blocks(op, {"input", "weight"});
}

}  // namespace

void decode_parameters(const Analysis& analysis, Pass pass, Step& step) {
  std::vector<Instruction> code;
  for (const int op : step.ops) {
    for (const std::string& name : analysis.ops()[op].parameters) {
      const std::string format = analysis.parameter_format(op, name);
      if (format.empty()) continue;
      const Value decoded{Kind::Temporary, op, name};
      const bool is_argument = replace_argument(step, {Kind::Parameter, op, name}, decoded);
      const bool is_slot = replace_argument(step, {Kind::Slot, op, name}, decoded);
      if (!is_argument && !is_slot) continue;
      const Value codes{Kind::Parameter, op, name, Value::Part::Codes};
      const Value scale{Kind::Parameter, op, name, Value::Part::Scale};
      const Attribute dtype = to_text(analysis.compute_dtype(op));
      // The gradient keeps a compiler from decoding in forward, and from keeping the result.
      const Value gradient{Kind::Grad, step.last() + 1};
      if (pass == Pass::Backward) {
        code.push_back({.target = kDecodeSaved,
                        .arguments = {gradient, codes, scale, Attribute(format), dtype},
                        .results = {decoded}});
      } else {
        code.push_back({.target = kDecode,
                        .arguments = {codes, scale, Attribute(format), dtype, None{}},
                        .results = {decoded}});
      }
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
