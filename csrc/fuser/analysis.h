// What follows from a list of ops and the key before any fusion: computed once for a plan, read by
// guards and by lowering.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fuser/op_node.h"
#include "fuser/plan_key.h"

namespace transformer_ops {

// Boundary i lies before op i. Keeps references to both arguments. Throws PlanError for a key of
// other ops.
class Analysis {
 public:
  Analysis(const std::vector<OpNode>& ops, const PlanKey& key);

  const std::vector<OpNode>& ops() const { return ops_; }
  const PlanKey& key() const { return key_; }
  int size() const { return static_cast<int>(ops_.size()); }

  // Does an op only hand its main tensor on, in both passes: a dropout that is off, an Identity?
  bool is_idle(int op) const;

  // Does a recipe have an op take quantized operands, or round its main tensor?
  bool is_quantized(int op) const;
  // The dtype of those operands, in which such a product is computed.
  DType operand_dtype(int op) const;
  // Does such a product get an operand as the values of its codes, and their scale beside them?
  bool has_scale(int op, const std::string& operand) const;
  // Does such a product get all these operands as codes, and beside them a scale for each block?
  bool has_blocks(int op, std::initializer_list<const char*> operands) const;

  // Of the main tensor at each boundary.
  const std::vector<DType>& dtypes() const { return dtypes_; }
  // The dtype that an op insists on for its input, or none.
  std::optional<DType> required_dtype(int op) const;
  // The dtype that an op computes in.
  DType compute_dtype(int op) const { return required_dtype(op).value_or(dtypes_[op]); }
  DType extra_input_dtype(int op, int k) const;
  // Is a parameter, tensor of one or extra input of the op there? An optional one may be None.
  bool has_parameter(int op, const std::string& name) const;
  bool has_extra_input(int op, int k) const;
  // Of a parameter, the names of its tensors: more than one where it is a list.
  std::vector<std::string> tensors_of(int op, const std::string& parameter) const;
  // In which a parameter, or each tensor of it, is held; exact where it is a plain tensor.
  NumberFormat parameter_format(int op, const std::string& name) const;

  // Does anybody want the gradient of the main tensor at a boundary?
  bool needs_grad(int boundary) const { return needs_grad_[boundary]; }
  // Of an op, in the order of its declaration.
  std::span<const TensorMeta> parameters(int op) const {
    return std::span(key_.tensors).subspan(first_parameter_[op], ops_[op].parameters.size());
  }
  bool parameter_requires_grad(int op, int k) const {
    return key_.grad_enabled && parameters(op)[k].requires_grad;
  }
  // Of a list: does any of its tensors?
  bool parameter_requires_grad(int op, const std::string& name) const;
  bool extra_input_requires_grad(int op, int k) const;
  // Does an extra input hold integers, which have no gradient?
  bool is_integer(int op, int k) const;
  // The first op that needs a backward; size() where none does.
  int first_backward() const { return first_backward_; }

  // The ops that take extra output k of an op by a channel.
  const std::vector<int>& readers(int op, int k) const { return readers_[op][k]; }
  bool extra_output_is_read(int op, int k) const {
    return ops_[op].visible[k] || !readers_[op][k].empty();
  }

 private:
  void number_tensors();
  void check_tensors() const;
  void check_parameters(int i) const;
  bool has_tensor(int op, const std::string& name) const;
  void propagate_dtypes();
  void propagate_requires_grad();
  // Of an extra input from the caller.
  const TensorMeta& from_caller(int op, int k) const;

  const std::vector<OpNode>& ops_;
  const PlanKey& key_;
  std::vector<std::vector<int>> caller_index_;  // per op and extra input, in key_; -1: a channel
  std::vector<size_t> first_parameter_;         // per op, in key_
  std::vector<std::vector<std::vector<int>>> readers_;  // per op and extra output
  std::vector<DType> dtypes_;
  std::vector<bool> needs_grad_;
  int first_backward_ = 0;
};

}  // namespace transformer_ops
