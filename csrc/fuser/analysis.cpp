#include "fuser/analysis.h"

#include <algorithm>

#include "fuser/declaration.h"
#include "fuser/error.h"

namespace transformer_ops {

Analysis::Analysis(const std::vector<OpNode>& ops, const PlanKey& key) : ops_(ops), key_(key) {
  number_tensors();
  propagate_dtypes();
  propagate_requires_grad();
}

bool Analysis::is_idle(int op) const {
  const OpNode& node = ops_[op];
  if (!node.native) return false;
  const OpDeclaration& row = declaration(node.kind);
  if (row.forward_schema.empty() && row.backward_schema.empty()) return true;
  return row.inactive && row.inactive(node.attributes, key_.training[op]);
}

void Analysis::number_tensors() {
  readers_.resize(ops_.size());
  for (int i = 0; i < size(); ++i) readers_[i].resize(ops_[i].extra_outputs);
  int next = 1;  // behind the main input
  for (int i = 0; i < size(); ++i) {
    std::vector<int>& indices = caller_index_.emplace_back();
    for (const auto& source : ops_[i].sources) {
      indices.push_back(source ? -1 : next++);
      if (source) readers_[source->op][source->output].push_back(i);
    }
  }
  for (const OpNode& op : ops_) {
    first_parameter_.push_back(next);
    next += op.parameters;
  }
  check(key_.tensors.size() == static_cast<size_t>(next), "key must have ", next,
        " tensors: the main input, extra inputs and parameters, got ", key_.tensors.size());
  check(key_.training.size() == ops_.size(), "key must have a training flag for each of ",
        ops_.size(), " ops, got ", key_.training.size());
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
      for (int k = 0; k < ops_[i].extra_inputs; ++k) next = promote(next, extra_input_dtype(i, k));
    }
    dtypes_.push_back(next);
  }
}

std::optional<DType> Analysis::required_dtype(int op) const {
  if (!ops_[op].native) return std::nullopt;
  switch (declaration(ops_[op].kind).dtype) {
    case DTypeRule::Parameter: {
      // As in torch, autocast leaves float64 alone.
      const DType parameter = parameters(op)[0].dtype;
      return parameter == DType::Float64 ? parameter : key_.autocast.value_or(parameter);
    }
    case DTypeRule::Autocast:
      return dtypes_[op] == DType::Float64 ? std::nullopt : key_.autocast;
    default:
      return std::nullopt;
  }
}

DType Analysis::extra_input_dtype(int op, int k) const {
  const auto& source = ops_[op].sources[k];
  return source ? dtypes_[source->op] : from_caller(op, k).dtype;
}

void Analysis::propagate_requires_grad() {
  needs_grad_ = {key_.grad_enabled && key_.tensors[0].requires_grad};
  for (int i = 0; i < size(); ++i) {
    bool needs = needs_grad_[i];
    for (int k = 0; k < ops_[i].parameters; ++k) needs |= parameter_requires_grad(i, k);
    for (int k = 0; k < ops_[i].extra_inputs; ++k) needs |= extra_input_requires_grad(i, k);
    needs_grad_.push_back(needs);
  }
  const auto first = std::ranges::find(needs_grad_, true) - needs_grad_.begin();
  // Boundary i + 1 needs a gradient first where op i has a tensor that does.
  first_backward_ = std::min(std::max(static_cast<int>(first) - 1, 0), size());
}

bool Analysis::parameter_requires_grad(int op, const std::string& name) const {
  const auto& names = declaration(ops_[op].kind).parameters;
  return parameter_requires_grad(op,
                                 static_cast<int>(std::ranges::find(names, name) - names.begin()));
}

bool Analysis::extra_input_requires_grad(int op, int k) const {
  if (!key_.grad_enabled) return false;
  const auto& source = ops_[op].sources[k];
  return source ? needs_grad_[source->op + 1] : from_caller(op, k).requires_grad;
}

}  // namespace transformer_ops
