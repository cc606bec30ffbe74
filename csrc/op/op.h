#pragma once

#include "fuser/declaration.h"
#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// What double backward knows about an op whose input was not saved.
struct ReplayCall {
  Tensor input;  // has correct derivatives, but placeholder values
  std::function<Tensor(const std::string&)> slot;  // undefined if not saved
  Tensor output;                                   // undefined if not saved
  const Attributes& attributes;
  // The tensors of another argument of forward; extra inputs are placeholders, as `input` is.
  std::function<Tensors(const std::string&)> tensors;
  // Provides an extra output that cannot be computed from placeholder values.
  std::function<void(const std::string&, Tensor)> give;
};

// The one declaration of a basic op: the planner's row, its typed ops, and its replay.
struct Op {
  OpDeclaration declaration;
  TypedOp forward = {};
  TypedOp backward = {};
  TypedOp recompute = {};  // only for an op that is cheap to recompute
  // Computes the op's output from what was saved instead of the input. It is absent if the
  // derivative does not depend on the input's values, or if the input is always saved.
  std::function<Tensor(const ReplayCall&)> replay = {};
};

// Adds a backward to an op whose gradients follow from its decomposition (op/defaults.h).
void derive_backward(Op& op);

// Registers an op under the name of a library that is loaded separately (op/library.h).
void register_op(const std::string& library, Op op);
// Registers a built-in op. Returns true, so that a file can do so in a static initializer.
bool register_op(Op op);
// The replay of a kind; empty if it has none.
const std::function<Tensor(const ReplayCall&)>& find_replay(const std::string& kind);

// A fused op: its rule row and its typed ops.
struct FusedOp {
  Rule rule;
  TypedOp forward = {};
  TypedOp backward = {};
  TypedOp recompute = {};
};
void register_fused_op(const std::string& library, FusedOp op);
bool register_fused_op(FusedOp op);

}  // namespace transformer_ops
