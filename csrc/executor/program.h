#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "executor/frozen_weights.h"
#include "executor/handle.h"
#include "fuser/declaration.h"
#include "fuser/plan.h"
#include "op/typed_op.h"

namespace transformer_ops {

class NativeResults;
class PartialBackwards;

// The user's name for an op in error texts: a class, and a path such as "op 1 of the Sequential".
// The path is empty for an op that is called alone.
struct OpName {
  std::string name;
  std::string path = {};
  std::string whole = {};

  bool operator==(const OpName&) const = default;
};

// A plan with numbered values and resolved ops, which the interpreter runs.
struct Program {
  struct Constant {
    c10::IValue value;
  };
  struct ShapeOf {
    int metadata;
  };
  struct Load {
    int value;
    bool last = false;  // no later line reads it, so the call may take its memory
  };
  using LoadList = std::vector<Load>;
  using Operand = std::variant<Load, Constant, ShapeOf, LoadList>;

  // The gradient of the output of op `op`. It affects the gradients of that op and of earlier ones.
  struct Gradient {
    int value;
    int op;
    int metadata = -1;  // for zeros that replace it
  };
  struct Call {
    c10::OperatorHandle op;
    const c10::FunctionSchema* schema;  // the schema of the name in the plan
    const TypedOp* typed;               // null for a torch op
    std::string name;
    std::vector<Operand> operands;
    std::vector<int> results;  // including the tensors of lists
    // If a result is a list: for each result, its number of tensors, or -1 if it is no list.
    std::vector<int> counts = {};
    std::vector<Gradient> gradients = {};  // among the values it reads
    std::vector<int> result_ops = {};  // parallel to results: the op that each gradient belongs to
    // The declaration whose backward the call is, or null.
    const OpDeclaration* backward_of = nullptr;
    // Returns only gradients that can be zeros, so the call is not needed if no gradient was given.
    bool skippable = false;
    // The result that is the gradient of a weight which accumulates, the op of that weight, and the
    // op that writes it into the buffer directly.
    struct Accumulates {
      int result;                // the index among the schema's results
      size_t first;              // the index among `results`
      std::vector<bool> wanted;  // for each tensor of a list
      int op;
      std::optional<c10::OperatorHandle> into;
      bool later;  // the host runs the call after backward
    };
    std::optional<Accumulates> accumulates = {};
    std::optional<WeightCache::Call> weight_cache_key = {};  // used if weights are frozen
    // If `op` is run_call (op/run_call.h), the text of the call; only the tensors are arguments.
    c10::IValue text = {};
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
  // Takes the metadata of a forward value.
  struct TakeMetadata {
    int value;
    int metadata;
  };
  // Records a largest magnitude in a state.
  struct Record {
    int found;
    int state;
    int64_t place;
  };
  // Casts a gradient to the dtype of its tensor, which a host step chose.
  struct FitDtype {
    int value;
    int metadata;
  };
  // A step that the host language runs; -1 among values means None.
  struct HostForward {
    int step;
    std::string name;
    std::vector<int> arguments;
    std::vector<int> results;
    struct OpDtype {
      int parameter = -1;  // a parameter's dtype starts the rule anew; -1 if none does
      bool autocasts = false;
    };
    std::vector<OpDtype> dtypes;
    std::vector<Value> names;  // parallel to results
    // What the native ops that it covers return, null if it covers others; and their parameters.
    std::shared_ptr<NativeResults> native = {};
    std::vector<int> parameters = {};
  };
  struct HostBackward {
    int step;
    std::string name;
    std::vector<Gradient> gradients;
    struct Saved {
      int own_row = -1;  // the row of what its context saved, or
      std::vector<int> slots = {};
      int dtype = -1;  // shows the dtype that a native forward computed in
    };
    std::vector<Saved> saved;  // a row for each op
    struct Result {
      enum class Of : uint8_t { Input, Parameter, ExtraInput };
      int value;  // -1 if it is not wanted
      Of of;
      int op;
      int k = 0;  // the index among the parameters or extra inputs of the op
      int metadata = -1;
      bool accumulates = false;
      int previous = -1;  // the sum of gradients that it is added to
    };
    std::vector<Result> results;
    bool skippable = false;
  };
  struct Line {
    std::variant<Call, Cast, Copy, Record, TakeMetadata, FitDtype, HostForward, HostBackward> what;
    std::vector<int> dead = {};  // values that no later line reads
    int op = 0;                  // the first op of its step
  };
  struct Code {
    std::vector<Line> lines;
    int values = 0;
    // The values that plan_forward or plan_backward returns (executor/pass_ops.h); empty if only
    // the lines can run, one by one.
    std::vector<int> results = {};
  };

  Plan plan;
  std::vector<OpName> names = {};  // for each op; empty if unknown
  uint64_t id = handles::next_id();
  bool has_host_steps = false;
  bool accumulates = false;     // a weight's gradient goes into a buffer, or is computed later
  bool gives_integers = false;  // an extra output may hold integers
  bool random = false;          // draws from torch's generator
  bool only_views = false;      // its only output is its input, or a view of it

  Code forward;
  std::vector<int> inputs;   // main, extra inputs, parameters, states
  std::vector<int> outputs;  // main, extra outputs
  // For each op: does the host save tensors for it, instead of the slots of its declaration?
  std::vector<bool> keeps_own;
  std::vector<int> boundaries;  // the main tensor before each op, and the last one
  // Outputs 1 to `constants` do not depend on anything that needs a gradient.
  size_t constants = 0;
  std::vector<size_t> detached;      // the other outputs that have no gradient
  std::vector<int> saved;            // forward values to save, each once
  std::map<Value, int> saved_slots;  // slots and parameters -> index in saved
  // States that backward updates: forward value, backward value. They are not saved tensors,
  // because hooks may copy those, and they must not be written to.
  std::vector<std::pair<int, int>> updated;
  int metadata = 0;  // the number of metadata rows that forward takes and backward reads
  // Does backward read metadata even if all gradients are given?
  bool always_reads_metadata = false;

  Code backward;
  std::vector<int> output_grads;                // parallel to outputs, without the constants
  std::vector<int> loads;                       // parallel to saved: the backward value, or -1
  std::vector<std::pair<int, int>> more_loads;  // (index in saved, another backward value)
  std::vector<int> input_grads;                 // parallel to inputs; -1 if there is none
  std::vector<bool> views;   // parallel to input_grads: may be a view of another gradient
  std::vector<int> delayed;  // inputs whose gradients are computed after backward
  std::shared_ptr<PartialBackwards> parts;  // parts of backward, made on demand
};

// Throws c10::Error (RuntimeError) for an unknown op, or a call that does not fit the op's schema.
Program compile(const Plan& plan);

// The values that a line reads and writes.
std::vector<int> values_read(const Program::Line& line);
std::vector<int> values_written(const Program::Line& line);
// Does a backward line need the metadata of a forward value, except for zeros that replace missing
// gradients?
bool reads_metadata(const Program::Line& line);

// A group, the cache of texts, and the autograd nodes of its calls hold such handles.
extern template class Handle<const Program>;
using SharedProgram = Handle<const Program>;
using WeakProgram = WeakHandle<const Program>;
SharedProgram share(Program program);

// The program of a plan's text, or of that text in one line (executor/plan_line.h), which must have
// native steps only. Recently used programs are cached.
SharedProgram program_for(std::string_view text);
// The program of the same ops without fusions, for tensors with other flags than the plan was made
// for. It is in the same cache.
SharedProgram unfused_program_for(const Program& program, at::TensorList tensors);

c10::IValue to_ivalue(const Attribute& attribute);

}  // namespace transformer_ops
