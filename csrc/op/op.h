#pragma once

#include "fuser/declaration.h"
#include "fuser/rule.h"
#include "op/typed_op.h"

namespace transformer_ops {

// What double backward knows of an op whose input was not saved.
struct ReplayCall {
  Tensor input;  // right derivatives, but its values are a stand-in
  std::function<Tensor(const std::string&)> slot;  // undefined where not saved
  Tensor output;                                   // undefined where not saved
  const Attributes& attributes;
  std::function<Tensor(const std::string&)> extra_input;  // as `input`
  // Takes an extra output, in the place of one that cannot be computed from stand-ins.
  std::function<void(const std::string&, Tensor)> give;
};

// The one declaration of a basic op: the planner's row, its typed ops, and its replay.
struct Op {
  OpDeclaration declaration;
  TypedOp forward = {};
  TypedOp backward = {};
  TypedOp recompute = {};  // of a cheap producer
  // The op's output, from what was saved instead of the input. Absent where the derivative does not
  // depend on the input's values, or the input is always saved.
  std::function<Tensor(const ReplayCall&)> replay = {};
};

// Gives an op whose gradients follow from its decomposition a backward (op/defaults.h).
void derive_backward(Op& op);

// Of a library that is loaded beside this one, under the name of that library: op/library.h.
void register_op(const std::string& library, Op op);
// A built-in one. Returns true, so that a file can register its op as it is loaded.
bool register_op(Op op);
// The replay of a kind; empty where it has none.
const std::function<Tensor(const ReplayCall&)>& find_replay(const std::string& kind);

// A fused op: its rule row and its typed ops.
struct FusedOp {
  Rule rule;
  TypedOp forward = {};
  TypedOp backward = {};
};
void register_fused_op(const std::string& library, FusedOp op);
bool register_fused_op(FusedOp op);

}  // namespace transformer_ops
