#include "fuser/round_operands.h"

#include <algorithm>

#include "fuser/casts.h"
#include "fuser/error.h"
#include "fuser/quantize.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

Argument taken(const Result& result) {
  if (const auto* const list = std::get_if<ValueList>(&result)) return *list;
  return std::get<Value>(result);
}

template <typename Item>
ValueList as_list(const Item& item) {
  const auto* const list = std::get_if<ValueList>(&item);
  return list != nullptr ? *list : ValueList{std::get<Value>(item)};
}

void add_casts(const Argument& from, DType dtype, const Result& to,
               std::vector<Instruction>& code) {
  const ValueList sources = as_list(from), casts = as_list(to);
  for (size_t i = 0; i < sources.size(); ++i) {
    code.push_back(make_cast(sources[i], dtype, casts[i]));
  }
}

bool is_written(const Result& result, const std::vector<Instruction>& code) {
  const auto is_same = [&](const Result& each) { return as_list(each) == as_list(result); };
  return std::ranges::any_of(
      code, [&](const Instruction& call) { return std::ranges::any_of(call.results, is_same); });
}

// The scale of a rounded operand.
Value scale_of(Value rounded) {
  rounded.name += "_scale";
  return rounded;
}

}  // namespace

void RoundOperands::set_operands(std::vector<std::string> operands) {
  takes_codes_ = analysis_.key().device == Device::Cuda &&
                 std::ranges::all_of(operands, [&](const std::string& operand) {
                   return has_scale(operand) && !formats_.format(operand).codes_dtype().empty();
                 });
}

bool RoundOperands::has_scale(const std::string& operand) const {
  const bool is_product = !row_.forward_schema.empty();
  return is_product && (has_blocks_ || analysis_.has_scale(op_, operand));
}

std::string RoundOperands::rounded_dtype(NumberFormat format) const {
  return takes_codes_ ? format.codes_dtype() : to_text(dtype_);
}

// The group sizes of an operand. Weights need none, because each is a matrix of its own.
Argument RoundOperands::rows_of(const std::string& operand) const {
  return operand == "weight" ? Argument(None{}) : *splits_;
}

// The op that rounds an operand.
std::string RoundOperands::target(const std::string& operand, NumberFormat format,
                                  bool is_saved) const {
  const bool sums_rows = is_saved || format != formats_.format(operand);
  std::string name = kRoundCall;
  if (has_blocks_) {
    // The two codes of a byte follow each other along the sum.
    name = sums_rows && format.has_pairs_of_codes() ? "quantize_columns" : "quantize";
  } else if (has_scale(operand)) {
    name = kRoundValues;
  } else if (splits_) {
    name = "quantize_dequantize_groups";
  }
  if (formats_.is_delayed()) name += kScaled;
  if (formats_.is_stochastic(operand)) name += "_stochastic";
  return is_saved ? name + kSaved : name;
}

// Under delayed scaling the scale is a state of the op, at the operand's index, and the largest
// magnitude goes to another state.
Instruction RoundOperands::call(const std::string& operand, const Argument& from,
                                NumberFormat format, const Result& to, bool is_saved) const {
  const bool is_gradient = operand == "grad_output";
  Instruction call{
      .target = target(operand, format, is_saved), .arguments = {from}, .results = {to}};
  if (formats_.is_delayed()) {
    const int64_t position = is_gradient ? 2 : operand == "weight" ? 1 : 0;
    call.arguments.push_back(Value{Kind::State, op_, kScaleStates[0]});
    call.arguments.push_back(Attribute(position));
  }
  if (splits_) call.arguments.push_back(rows_of(operand));
  call.arguments.push_back(Attribute(format.name()));
  if (!has_blocks_) call.arguments.push_back(Attribute(rounded_dtype(format)));
  if (has_scale(operand)) call.results.push_back(scale_of(std::get<Value>(to)));
  if (formats_.is_delayed() && !is_saved) {
    call.results.push_back(records_ ? Value{Kind::State, op_, kScaleStates[is_gradient ? 2 : 1]}
                                    : temporary("amax_" + operand));
  }
  return call;
}

// Adds a call that rounds each tensor. Groups are rounded by one call, which takes and returns a
// list.
void RoundOperands::add_calls(const std::string& operand, const Argument& from, NumberFormat format,
                              const Result& to, bool is_saved,
                              std::vector<Instruction>& code) const {
  const ValueList sources = as_list(from), results = as_list(to);
  const size_t calls = splits_ ? 1 : sources.size();
  const bool has_scales = formats_.is_delayed() && std::holds_alternative<ValueList>(from);
  check(splits_ || !has_scales, "[", row_.kind,
        "] recipe must have no delayed scales, which are those of one weight, got ", sources.size(),
        " weights");
  for (size_t i = 0; i < calls; ++i) {
    if (sources[i] == results[i]) continue;
    if (is_decoded(sources[i])) {
      code.push_back(make_cast(sources[i], dtype_, results[i]));
      continue;
    }
    Instruction made = splits_ ? call(operand, sources, format, results, is_saved)
                               : call(operand, sources[i], format, results[i], is_saved);
    if (is_saved) made.arguments.insert(made.arguments.begin(), gradient());
    code.push_back(std::move(made));
  }
}

// Is it a weight that is stored quantized, which is not rounded a second time?
bool RoundOperands::is_decoded(const Value& value) const {
  return value.kind == Kind::Temporary && value.op == op_ &&
         !analysis_.parameter_format(op_, value.name).is_exact();
}

// The values that replace an operand: one, or one for each tensor of a list.
Result RoundOperands::places(const RoundedOperand& operand, const Argument& from) const {
  const auto* const sources = std::get_if<ValueList>(&from);
  if (sources == nullptr) return temporary("rounded_" + operand.name + operand.use);
  const auto names = row_.tensors_of(operand.name, analysis_.ops()[op_].attributes);
  const bool has_its_dtype = dtype_ == analysis_.compute_dtype(op_);
  ValueList list;
  for (size_t i = 0; i < names.size(); ++i) {
    const bool stays = has_its_dtype && is_decoded((*sources)[i]);
    list.push_back(stays ? (*sources)[i] : temporary("rounded_" + names[i] + operand.use));
  }
  return list;
}

Argument RoundOperands::rounded(const RoundedOperand& operand, const Argument& from,
                                NumberFormat format, std::vector<Instruction>& code) const {
  const Result to = places(operand, from);
  if (is_written(to, code)) return taken(to);
  if (format.is_exact()) {
    add_casts(from, dtype_, to, code);
  } else {
    add_calls(operand.name, from, format, to, /*is_saved=*/false, code);
  }
  return taken(to);
}

Argument RoundOperands::rounded_again(const std::string& operand, const Argument& from,
                                      NumberFormat format, std::vector<Instruction>& code) const {
  const Result to = places({operand}, from);
  if (format.is_exact()) {
    add_casts(from, dtype_, to, code);
  } else {
    add_calls(operand, from, format, to, /*is_saved=*/true, code);
  }
  return taken(to);
}

Value RoundOperands::transformed(const std::string& operand, const Argument& from,
                                 std::vector<Instruction>& code) const {
  const Value to = temporary("turned_" + operand);
  code.push_back({.target = "hadamard_columns",
                  .arguments = {gradient(), from, splits_.value_or(None{})},
                  .results = {to}});
  return to;
}

void RoundOperands::take_scales(Instruction& product, const RoundedOperand& left,
                                const RoundedOperand& right) const {
  if (!has_scale(left.name) && !has_scale(right.name)) return;
  product.target += kScaled;
  for (const auto& [name, use] : {left, right}) {
    const Value scale = scale_of(temporary("rounded_" + name + use));
    product.arguments.push_back(has_scale(name) ? Argument(scale) : Argument(None{}));
  }
}

}  // namespace transformer_ops
