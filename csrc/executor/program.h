#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "fuser/plan.h"
#include "ops/typed_op.h"

namespace transformer_ops {

// A plan with its values numbered and its ops looked up: what the walker runs.
struct Program {
  struct Constant {
    c10::IValue value;
  };
  struct ShapeOf {
    int index;  // among Code::shapes
  };
  struct Load {
    int value;
    bool last = false;  // nobody reads it afterwards: the call may have its memory
  };
  using Operand = std::variant<Load, Constant, ShapeOf>;

  // A gradient that comes in behind op `op` reaches the gradients of that op and those before it.
  struct Gradient {
    int value;
    int op;
  };
  struct Call {
    c10::OperatorHandle op;
    const TypedOp* typed;  // null for an op of torch's own
    std::string name;
    std::vector<Operand> operands;
    std::vector<int> results;
    std::vector<Gradient> gradients;  // among the values it reads
    std::vector<int> result_ops;      // parallel to results: what the gradient belongs to
  };
  struct Cast {
    std::string step;
    at::ScalarType dtype;
    int from;
    int to;
  };
  struct Copy {
    int from;
    int to;
  };
  struct Line {
    std::variant<Call, Cast, Copy> what;
    std::vector<int> dead;  // values nobody reads after it
  };
  struct Code {
    std::vector<Line> lines;
    int values = 0;
  };

  Plan plan;
  uint64_t id = 0;          // no other program of the process has it
  bool random = false;      // draws from torch's generator
  bool only_views = false;  // its one output is its input, or a view of it

  Code forward;
  std::vector<int> inputs;   // main, extra inputs, parameters
  std::vector<int> outputs;  // main, extra outputs
  // Outputs 1 to `constants` come from before all that needs a gradient.
  size_t constants = 0;
  std::vector<int> saved;            // forward values to save, each once
  std::map<Value, int> saved_slots;  // slots and parameters -> position in saved
  std::vector<int> shapes;           // forward values whose shape backward reads

  Code backward;
  std::vector<int> output_grads;                // parallel to outputs, without the constants
  std::vector<int> loads;                       // parallel to saved: the backward value, or -1
  std::vector<std::pair<int, int>> more_loads;  // (position in saved, another backward value)
  std::vector<int> input_grads;                 // parallel to inputs; -1 where there is none
  std::vector<bool> views;                      // parallel to input_grads: of other gradients
};

// Throws c10::Error (RuntimeError) for a plan with Python steps, an unknown op, or a call that does
// not fit the op's schema.
Program compile(const Plan& plan);

// The same check without the rest; calls that Python runs are left out.
void check_calls(const Plan& plan);

// Owns a program together with its other owners: a group, the cache of texts, the autograd nodes of
// its calls. The count is that of an empty tensor, the one thing that a node's saved data can own
// and compiled autograd can trace.
class SharedProgram {
 public:
  SharedProgram() = default;
  explicit SharedProgram(Program program);

  explicit operator bool() const { return owner_.defined(); }
  const Program& operator*() const {
    return *static_cast<const Program*>(owner_.unsafeGetTensorImpl()->unsafe_storage().data());
  }
  const Program* operator->() const { return &**this; }

  // What a node keeps, and the way back. A trace puts another tensor in the owner's place: there
  // the program is found by its id.
  const Tensor& owner() const { return owner_; }
  static SharedProgram from(const Tensor& owner, uint64_t id);

 private:
  explicit SharedProgram(Tensor owner) : owner_(std::move(owner)) {}

  Tensor owner_;
};

// The program of a plan's text. The ones asked for last are kept.
SharedProgram program_for(const std::string& text);
// The program of the same ops without fusions, for tensors with other flags than the plan was made
// for. Kept in the same place.
SharedProgram unfused_program_for(const Program& program, at::TensorList tensors);

at::ScalarType to_torch(DType dtype);
DType to_dtype(at::ScalarType dtype);
c10::IValue to_ivalue(const Attribute& attribute);

}  // namespace transformer_ops
