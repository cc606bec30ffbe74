#include "fuser/analysis.h"

#include <algorithm>

#include "fuser/declaration.h"
#include "fuser/error.h"

namespace transformer_ops {
namespace {

using Names = std::vector<std::string>;

std::string name_of_format(NumberFormat format) {
  return format.is_exact() ? "a plain tensor" : format.name();
}

}  // namespace

Analysis::Analysis(const std::vector<OpNode>& ops, const PlanKey& key) : ops_(ops), key_(key) {
  number_tensors();
  check_tensors();
  propagate_dtypes();
  propagate_requires_grad();
}

bool Analysis::is_idle(int op) const {
  const OpNode& node = ops_[op];
  if (!node.native) return false;
  const OpDeclaration& row = declaration(node.kind);
  if (is_quantized(op)) return false;
  if (row.forward_schema.empty() && row.backward_schema.empty()) return true;
  return row.inactive && row.inactive(node.attributes, key_.training[op]);
}

bool Analysis::is_quantized(int op) const {
  const OpNode& node = ops_[op];
  return node.native && transformer_ops::is_quantized(declaration(node.kind), op, key_.recipe);
}

DType Analysis::operand_dtype(int op) const {
  DType dtype = compute_dtype(op);
  const OperandFormats& formats = key_.recipe->of(op);
  // Other devices have no products with a scale.
  const bool scalable = declaration(ops_[op].kind).scalable && key_.device != Device::Other;
  for (const char* operand : {"input", "weight", "grad_output"}) {
    // An operand that is stored quantized is not rounded.
    if (!parameter_format(op, operand).is_exact()) continue;
    dtype = formats.format(operand).operand_dtype(dtype, scalable);
  }
  return dtype;
}

bool Analysis::has_scale(int op, const std::string& operand) const {
  if (operand_dtype(op) != DType::BFloat16 || !parameter_format(op, operand).is_exact())
    return false;
  return key_.recipe->of(op).format(operand).has_tensor_scale();
}

bool Analysis::has_blocks(int op, std::initializer_list<const char*> operands) const {
  const bool may_multiply = key_.device == Device::Cuda && declaration(ops_[op].kind).scalable;
  if (!may_multiply || operand_dtype(op) != DType::BFloat16) return false;
  std::vector<NumberFormat> formats;
  for (const std::string operand : operands) {
    if (!parameter_format(op, operand).is_exact()) return false;
    formats.push_back(key_.recipe->of(op).format(operand));
  }
  return are_multiplied_in_blocks(formats);
}

void Analysis::number_tensors() {
  readers_.resize(ops_.size());
  for (int i = 0; i < size(); ++i) readers_[i].resize(ops_[i].extra_outputs.size());
  int next = 1;  // the main input is first
  for (int i = 0; i < size(); ++i) {
    std::vector<int>& indices = caller_index_.emplace_back();
    for (const auto& source : ops_[i].sources) {
      indices.push_back(source ? -1 : next++);
      if (source) readers_[source->op][source->output].push_back(i);
    }
  }
  for (const OpNode& op : ops_) {
    first_parameter_.push_back(next);
    next += static_cast<int>(op.parameters.size());
  }
  check(key_.tensors.size() == static_cast<size_t>(next), "key must have ", next,
        " tensors: the main input, extra inputs and parameters, got ", key_.tensors.size());
  check(key_.training.size() == ops_.size(), "key must have a training flag for each of ",
        ops_.size(), " ops, got ", key_.training.size());
}

// Checks that all required tensors are given, with a dtype of the right kind. Typed ops check
// sizes.
void Analysis::check_tensors() const {
  for (int i = 0; i < size(); ++i) {
    const OpNode& op = ops_[i];
    for (size_t k = 0; k < op.extra_inputs.size(); ++k) {
      if (!op.native || op.sources[k]) continue;
      const TensorMeta& given = from_caller(i, static_cast<int>(k));
      const OpDeclaration& row = declaration(op.kind);
      const std::string& name = op.extra_inputs[k];
      check(!given.is_absent || row.is_optional(name), "[", op.kind, "] ", name,
            " must be a tensor, got None");
      check(!row.is_integer(name) || given.dtype == DType::Unknown, "[", op.kind, "] ", name,
            " must hold integers, got ", to_text(given.dtype));
      check(!row.is_constant(name) || !key_.grad_enabled || !given.requires_grad, "[", op.kind,
            "] ", name, " must not require a gradient, got one that does");
    }
    check_parameters(i);
  }
}

void Analysis::check_parameters(int i) const {
  const OpNode& op = ops_[i];
  if (!op.native) {
    for (size_t k = 0; k < op.parameters.size(); ++k) {
      check(!parameters(i)[k].is_absent, "[", op.kind, "] ", op.parameters[k],
            " must be a tensor, got None");
    }
    return;
  }
  const OpDeclaration& row = declaration(op.kind);
  for (const ListedParameter& list : row.lists) {
    const Names names = row.tensors_of(list.parameter, op.attributes);
    Names given = op.parameters;
    std::erase_if(given, [&](auto& name) { return row.parameter_of(name) != list.parameter; });
    check(given == names, "[", op.kind, "] ", list.parameter, " must be a list of ", names.size(),
          " tensors, as ", list.count, " says, got ", given.size());
    const bool is_absent = list.optional && !has_parameter(i, list.parameter);
    const NumberFormat format = parameter_format(i, names.front());
    // One call rounds the weights of all groups.
    const bool is_one_call = row.has_extra_input("splits") && is_quantized(i);
    for (const std::string& name : names) {
      check(!is_one_call || parameter_format(i, name) == format, "[", op.kind, "] ", name,
            " must be held as ", names[0], " is under a recipe, got ",
            name_of_format(parameter_format(i, name)), " and ", name_of_format(format));
      check(is_absent || has_tensor(i, name), "[", op.kind, "] ", name,
            " must be a tensor, got None");
    }
  }
  for (size_t k = 0; k < op.parameters.size(); ++k) {
    const std::string& name = op.parameters[k];
    check(row.is_optional(name) || !parameters(i)[k].is_absent, "[", op.kind, "] ", name,
          " must be a tensor, got None");
    const NumberFormat format = parameter_format(i, name);
    check(format.is_exact() || row.has_operand(row.parameter_of(name)), "[", op.kind, "] ", name,
          " must be a plain tensor, got one that is quantized as ", format.name());
  }
}

const TensorMeta& Analysis::from_caller(int op, int k) const {
  return key_.tensors[caller_index_[op][k]];
}

void Analysis::propagate_dtypes() {
  dtypes_ = {key_.tensors[0].dtype};
  for (int i = 0; i < size(); ++i) {
    DType next = compute_dtype(i);
    if (!ops_[i].native) {
      next = DType::Unknown;
    } else if (declaration(ops_[i].kind).dtype == DTypeRule::Promote) {
      for (int k = 0; k < std::ssize(ops_[i].extra_inputs); ++k) {
        if (has_gradient(i, k) && has_extra_input(i, k)) {
          next = promote(next, extra_input_dtype(i, k));
        }
      }
    }
    const bool is_half = next == DType::Float16 || next == DType::BFloat16;
    if (is_half && ops_[i].native && declaration(ops_[i].kind).accumulates_output) {
      next = DType::Float32;
    }
    dtypes_.push_back(next);
  }
}

std::optional<DType> Analysis::required_dtype(int op) const {
  if (!ops_[op].native) return std::nullopt;
  switch (declaration(ops_[op].kind).dtype) {
    case DTypeRule::Parameter: {
      // Autocast does not change float64, as in torch.
      const DType parameter = parameters(op)[0].dtype;
      return parameter == DType::Float64 ? parameter : key_.autocast.value_or(parameter);
    }
    case DTypeRule::Autocast:
      return dtypes_[op] == DType::Float64 ? std::nullopt : key_.autocast;
    default:
      return std::nullopt;
  }
}

bool Analysis::keeps_dtype(int op, const std::string& tensor) const {
  if (key_.autocast || !ops_[op].native) return false;
  const OpDeclaration& row = declaration(ops_[op].kind);
  return std::ranges::count(row.own_dtype, row.parameter_of(tensor)) > 0;
}

DType Analysis::extra_input_dtype(int op, int k) const {
  const auto& source = ops_[op].sources[k];
  if (!source) return from_caller(op, k).dtype;
  return dtypes_[ops_[source->op].native ? source->op + 1 : source->op];
}

bool Analysis::has_parameter(int op, const std::string& name) const {
  return std::ranges::any_of(tensors_of(op, name),
                             [&](const std::string& tensor) { return has_tensor(op, tensor); });
}

bool Analysis::has_tensor(int op, const std::string& name) const {
  const int k = position_of(ops_[op].parameters, name);
  return k >= 0 && !parameters(op)[k].is_absent;
}

std::vector<std::string> Analysis::tensors_of(int op, const std::string& parameter) const {
  const OpNode& node = ops_[op];
  if (!node.native) return {parameter};
  return declaration(node.kind).tensors_of(parameter, node.attributes);
}

NumberFormat Analysis::parameter_format(int op, const std::string& name) const {
  NumberFormat found;
  for (const std::string& tensor : tensors_of(op, name)) {
    const int k = position_of(ops_[op].parameters, tensor);
    found = k < 0 ? NumberFormat() : parameters(op)[k].format;
    if (found.is_exact()) break;
  }
  return found;
}

bool Analysis::has_extra_input(int op, int k) const {
  return ops_[op].sources[k] || !from_caller(op, k).is_absent;
}

bool Analysis::is_integer(int op, int k) const {
  const auto holds_integers = [&](int i, const std::string& name) {
    return ops_[i].native && declaration(ops_[i].kind).is_integer(name);
  };
  const auto& source = ops_[op].sources[k];
  if (source && holds_integers(source->op, ops_[source->op].extra_outputs[source->output])) {
    return true;
  }
  return holds_integers(op, ops_[op].extra_inputs[k]);
}

void Analysis::propagate_requires_grad() {
  needs_grad_ = {key_.grad_enabled && key_.tensors[0].requires_grad};
  for (int i = 0; i < size(); ++i) {
    bool needs = needs_grad_[i];
    const OpNode& op = ops_[i];
    for (int k = 0; k < std::ssize(op.parameters); ++k) needs |= parameter_requires_grad(i, k);
    for (int k = 0; k < std::ssize(op.extra_inputs); ++k) needs |= extra_input_requires_grad(i, k);
    needs_grad_.push_back(needs);
  }
  const auto first = std::ranges::find(needs_grad_, true) - needs_grad_.begin();
  // Boundary i + 1 is the first that needs a gradient if op i is the first with a tensor that does.
  first_backward_ = std::min(std::max(static_cast<int>(first) - 1, 0), size());
}

bool Analysis::parameter_requires_grad(int op, const std::string& name) const {
  return std::ranges::any_of(tensors_of(op, name), [&](const std::string& tensor) {
    const int k = position_of(ops_[op].parameters, tensor);
    return k >= 0 && parameter_requires_grad(op, k);
  });
}

bool Analysis::has_gradient(int op, int k) const {
  const OpNode& node = ops_[op];
  const bool is_constant = node.native && declaration(node.kind).is_constant(node.extra_inputs[k]);
  return !is_constant && !is_integer(op, k);
}

bool Analysis::extra_input_requires_grad(int op, int k) const {
  if (!key_.grad_enabled || !has_gradient(op, k)) return false;
  const auto& source = ops_[op].sources[k];
  if (!source) return from_caller(op, k).requires_grad;
  const OpNode& producer = ops_[source->op];
  const std::string& name = producer.extra_outputs[source->output];
  if (producer.native && declaration(producer.kind).is_detached(name)) return false;
  return needs_grad_[source->op + 1];
}

}  // namespace transformer_ops
