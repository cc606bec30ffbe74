// What follows from a list of ops and the key before any fusion. It is computed once for a plan;
// guards and lowering read it.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fuser/op_node.h"
#include "fuser/plan_key.h"

namespace transformer_ops {

// Boundary i lies before op i. The object keeps references to both arguments. Throws PlanError if
// the key belongs to other ops.
class Analysis {
 public:
  Analysis(const std::vector<OpNode>& ops, const PlanKey& key);

  const std::vector<OpNode>& ops() const { return ops_; }
  const PlanKey& key() const { return key_; }
  int size() const { return static_cast<int>(ops_.size()); }

  // Does an op only pass its main tensor through, in both passes? Examples are Identity and an
  // inactive dropout.
  bool is_idle(int op) const;

  // Does the recipe quantize the op's operands, or make it round its main tensor?
  bool is_quantized(int op) const;
  // The dtype of those operands, in which the product is computed.
  DType operand_dtype(int op) const;
  // Does the product get the operand as values of codes, with a separate scale?
  bool has_scale(int op, const std::string& operand) const;
  // Does the product get all these operands as codes, with block scales?
  bool has_blocks(int op, std::initializer_list<const char*> operands) const;

  // The dtype of the main tensor at each boundary.
  const std::vector<DType>& dtypes() const { return dtypes_; }
  // The dtype that an op requires for its input, or none.
  std::optional<DType> required_dtype(int op) const;
  // The dtype that an op computes in.
  // Does the op read that tensor of a parameter in its own dtype?
  bool keeps_dtype(int op, const std::string& tensor) const;
  DType compute_dtype(int op) const { return required_dtype(op).value_or(dtypes_[op]); }
  DType extra_input_dtype(int op, int k) const;
  // Is a parameter, one tensor of a list, or an extra input of the op given? Optional ones may be
  // None.
  bool has_parameter(int op, const std::string& name) const;
  bool has_extra_input(int op, int k) const;
  // The names of a parameter's tensors: more than one if it is a list.
  std::vector<std::string> tensors_of(int op, const std::string& parameter) const;
  // The format in which a parameter is stored; exact for a plain tensor, and for a list with one.
  NumberFormat parameter_format(int op, const std::string& name) const;

  // Is the gradient of the main tensor at a boundary wanted?
  bool needs_grad(int boundary) const { return needs_grad_[boundary]; }
  // The tensors of an op's parameters, in the order of its declaration.
  std::span<const TensorMeta> parameters(int op) const {
    return std::span(key_.tensors).subspan(first_parameter_[op], ops_[op].parameters.size());
  }
  bool parameter_requires_grad(int op, int k) const {
    return key_.grad_enabled && parameters(op)[k].requires_grad;
  }
  // For a list: does any of its tensors require a gradient?
  bool parameter_requires_grad(int op, const std::string& name) const;
  bool extra_input_requires_grad(int op, int k) const;
  // Does an extra input hold integers, which have no gradient?
  bool is_integer(int op, int k) const;
  // Can an extra input have a gradient?
  bool has_gradient(int op, int k) const;
  // The first op that needs a backward; size() if none does.
  int first_backward() const { return first_backward_; }

  // The ops that read extra output k of an op through a channel.
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
  // The tensor of an extra input that the caller passes.
  const TensorMeta& from_caller(int op, int k) const;

  const std::vector<OpNode>& ops_;
  const PlanKey& key_;
  std::vector<std::vector<int>> caller_index_;  // per op and extra input, the index in key_; -1 for
                                                // a channel
  std::vector<size_t> first_parameter_;         // per op, the index in key_
  std::vector<std::vector<std::vector<int>>> readers_;  // per op and extra output
  std::vector<DType> dtypes_;
  std::vector<bool> needs_grad_;
  int first_backward_ = 0;
};

}  // namespace transformer_ops
