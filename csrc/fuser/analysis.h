// What follows from a list of ops and its facts before any fusion: computed once for a plan, read
// by guards and by lowering.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fuser/facts.h"

namespace transformer_ops {

// Boundary i lies before op i. Keeps references to both arguments.
class Analysis {
 public:
  Analysis(const std::vector<OpNode>& ops, const Facts& facts);

  const std::vector<OpNode>& ops() const { return ops_; }
  const Facts& facts() const { return facts_; }
  int size() const { return static_cast<int>(ops_.size()); }

  // Does an op only hand its main tensor on, in both passes: a dropout that is off, an Identity?
  bool is_idle(int op) const;

  // Of the main tensor at each boundary.
  const std::vector<DType>& dtypes() const { return dtypes_; }
  // The dtype that an op insists on for its input, or none.
  std::optional<DType> required_dtype(int op) const;
  // The dtype that an op computes in.
  DType compute_dtype(int op) const { return required_dtype(op).value_or(dtypes_[op]); }
  DType extra_input_dtype(int op, int k) const;

  // Does anybody want the gradient of the main tensor at a boundary?
  bool needs_grad(int boundary) const { return needs_grad_[boundary]; }
  bool parameter_requires_grad(int op, int k) const {
    return facts_.grad_enabled && facts_.parameters[op][k].requires_grad;
  }
  bool parameter_requires_grad(int op, const std::string& name) const;
  bool extra_input_requires_grad(int op, int k) const;
  // The first op that needs a backward; size() where none does.
  int first_backward() const { return first_backward_; }

  // The ops that take extra output k of an op by a channel.
  const std::vector<int>& readers(int op, int k) const { return readers_[op][k]; }
  bool extra_output_is_read(int op, int k) const {
    return ops_[op].visible[k] || !readers_[op][k].empty();
  }

 private:
  void number_extra_inputs();
  void propagate_dtypes();
  void propagate_requires_grad();
  // Of an extra input from the caller.
  const TensorFacts& from_caller(int op, int k) const;

  const std::vector<OpNode>& ops_;
  const Facts& facts_;
  std::vector<std::vector<int>> caller_index_;          // per op and extra input; -1 for a channel
  std::vector<std::vector<std::vector<int>>> readers_;  // per op and extra output
  std::vector<DType> dtypes_;
  std::vector<bool> needs_grad_;
  int first_backward_ = 0;
};

}  // namespace transformer_ops
