#pragma once

#include <compare>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "fuser/attribute.h"
#include "fuser/dtype.h"
#include "fuser/policies.h"
#include "fuser/recipe.h"

namespace transformer_ops {

// One tensor of a plan. Boundary i lies before op i, and boundary n after the last op.
//   x1 g1            main tensor and its gradient at a boundary; in backward x1 is recomputed
//   p1.weight        parameter                 dp1.weight  its gradient
//   e1.ids o1.ids    extra input and output    de1.ids do1.ids  their gradients
//   s1.input         saved slot                n1          the shape of x1
//   t1.input         temporary of a step of op 1
//   st1.fp8_scale    state: a buffer of the op
//   p1.weight0..3    p1.weight0 to p1.weight3, for example of a listed parameter
//   s1.input.codes s1.input.scale   parts of a slot or parameter that is stored quantized
struct Value {
  enum class Kind : uint8_t {
    Main,
    Grad,
    Parameter,
    ParameterGrad,
    ExtraInput,
    ExtraInputGrad,
    ExtraOutput,
    ExtraOutputGrad,
    Slot,
    Shape,
    Temporary,
    State,
  };
  enum class Part : uint8_t { Whole, Codes, Scale };

  Kind kind = Kind::Main;
  int op = 0;
  std::string name = {};
  Part part = Part::Whole;  // the part of a slot or a parameter

  auto operator<=>(const Value&) const = default;
};

// The gradient of a main tensor, parameter or extra tensor, and the tensor of a gradient.
Value gradient_of(Value tensor);
Value tensor_of(Value gradient);

std::string to_text(const Value& value);
bool is_boundary(Value::Kind kind);     // x1, g1 and n1 have no name
const char* name_of(Value::Kind kind);  // "main", "extra_input_grad"
const char* name_of(Value::Part part);  // "", "codes", "scale"
Value parse_value(const std::string& text);
// The values of one op, and whether the list has a value. The list must be sorted by op, as all
// lists of a plan are.
std::span<const Value> values_of(const std::vector<Value>& values, int op);
bool has_value(const std::vector<Value>& values, const Value& value);

struct None {
  bool operator==(const None&) const = default;
};
// Tensors that a call takes or returns as one list.
using ValueList = std::vector<Value>;
std::string to_text(const ValueList& list);
using Argument = std::variant<Value, ValueList, Attribute, None>;
using Result = std::variant<Value, ValueList>;

// Calls function(value) for each value among arguments or results, including those in lists.
template <typename Items, typename Function>
void for_each_value(Items& items, Function&& function) {
  for (auto& item : items) {
    if (auto* const value = std::get_if<Value>(&item)) function(*value);
    if (auto* const list = std::get_if<ValueList>(&item)) {
      for (auto& value : *list) function(value);
    }
  }
}

// The target that returns its first argument in the dtype of the second one.
inline constexpr const char* kCast = "cast";

// A placeholder for a result that is not wanted, or that another call computes.
Result unused_like(const Result& result);

// results = target(arguments), where the target is a typed op, the full name of a torch op, or a
// cast. Without a target, every result is the one argument itself.
struct Instruction {
  std::string target = {};
  std::vector<Argument> arguments = {};
  std::vector<Result> results = {};

  bool writes(const Value& value) const;
  bool operator==(const Instruction&) const = default;
};

// A slot and the forward tensor that it saves.
struct Save {
  Value slot;
  Value source;

  bool operator==(const Save&) const = default;
};

struct Step {
  std::string name = {};
  std::vector<int> ops = {};
  std::vector<Instruction> instructions = {};
  std::vector<Save> saves = {};
  // Runs this Python object of the planning call instead of instructions.
  std::optional<int> python = {};
  // A joint step has a partner with the same ops in the other pass.
  bool joint = false;
  // The step is skipped because nothing before it needs a gradient.
  bool skipped = false;

  int first() const { return ops.front(); }
  int last() const { return ops.back(); }
  bool operator==(const Step&) const = default;
};

struct PlannedOp {
  std::string kind;
  Attributes attributes = {};
  bool native = true;
  bool training = false;
  // The names of its extra tensors, in order.
  std::vector<std::string> extra_inputs = {};
  std::vector<std::string> extra_outputs = {};

  bool is_set(const std::string& flag) const;
  bool operator==(const PlannedOp&) const = default;
};

// An extra input that reads an extra output of another op of the group.
struct Route {
  Value input;
  Value output;

  bool operator==(const Route&) const = default;
};

struct Plan {
  std::vector<PlannedOp> ops = {};
  std::vector<Route> routes = {};
  std::vector<Value> extra_inputs = {};  // from the caller, in order
  // The parameters in the executor's order; codes and scale follow a quantized parameter.
  std::vector<Value> parameters = {};
  // Buffers of the ops, after the parameters. A recipe uses them from call to call.
  std::vector<Value> states = {};
  std::vector<Value> extra_outputs = {};  // to the caller, in order
  std::vector<Value> gradients = {};      // what backward returns: g0, de..., dp...
  int first_backward = 0;                 // ops before this one need no gradient
  std::optional<DType> autocast = {};
  const Recipe* recipe = nullptr;  // from recipe_of()
  SavedAs saved = {};
  std::vector<Step> forward = {};  // both lists are in op order; backward runs from its end
  std::vector<Step> backward = {};

  bool operator==(const Plan&) const = default;

  int size() const { return static_cast<int>(ops.size()); }
  bool needs_backward() const { return first_backward < size(); }
  bool has_python_steps() const;
  // The parameters as the ops see them, without the parts of quantized ones.
  std::vector<Value> whole_parameters() const;
  bool has_quantized_parameters() const;
  // Does forward save codes instead of a tensor?
  bool saves_codes() const;
  // The value that backward writes for a gradient: the gradient itself, or a state.
  Value result_of(const Value& gradient) const;
};

std::string to_text(const Plan& plan);
// Parses a plan and verifies it. Lines that begin with '#' are comments. Throws PlanError that
// names the line.
Plan parse_plan(const std::string& text);

// The planner's postcondition. Each list covers every op once, in order. Every value is written
// before it is read. Every slot that backward reads was saved. Backward returns the gradients that
// the plan names. Throws PlanError otherwise.
void verify(const Plan& plan);

}  // namespace transformer_ops
