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

  struct Call {
    c10::OperatorHandle op;
    const TypedOp* typed;  // null for an op of torch's own
    std::string name;
    std::vector<Operand> operands;
    std::vector<int> results;
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
  std::string text;
  bool random = false;  // draws from torch's generator

  Code forward;
  std::vector<int> inputs;           // main, extra inputs, parameters
  std::vector<int> outputs;          // main, extra outputs
  std::vector<int> saved;            // forward values to save, each once
  std::map<Value, int> saved_slots;  // slots and parameters -> position in saved
  std::vector<int> shapes;           // forward values whose shape backward reads

  Code backward;
  std::vector<int> output_grads;                // parallel to outputs
  std::vector<int> loads;                       // parallel to saved: the backward value, or -1
  std::vector<std::pair<int, int>> more_loads;  // (position in saved, another backward value)
  std::vector<int> input_grads;                 // parallel to inputs; -1 where there is none
};

// Throws c10::Error (RuntimeError) for a plan with Python steps or an unknown op.
Program compile(const Plan& plan);

// The program of a plan's text, kept for the life of the process.
const Program& program_for(const std::string& text);
const Program& program_for(const Plan& plan);

at::ScalarType to_torch(DType dtype);
DType to_dtype(at::ScalarType dtype);
c10::IValue to_ivalue(const Attribute& attribute);

}  // namespace transformer_ops
