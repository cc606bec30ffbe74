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

class PartialBackwards;

// What a user calls an op, for error texts: a class, and where it is, as in "op 1 of the
// Sequential"; the path is empty for an op that is called alone.
struct OpName {
  std::string name;
  std::string path = {};
  std::string whole = {};

  bool operator==(const OpName&) const = default;
};

// A plan with its values numbered and its ops looked up: what the interpreter runs.
struct Program {
  struct Constant {
    c10::IValue value;
  };
  struct ShapeOf {
    int metadata;
  };
  struct Load {
    int value;
    bool last = false;  // nobody reads it afterwards: the call may have its memory
  };
  using LoadList = std::vector<Load>;
  using Operand = std::variant<Load, Constant, ShapeOf, LoadList>;

  // A gradient that comes in behind op `op` reaches the gradients of that op and those before it.
  struct Gradient {
    int value;
    int op;
    int metadata = -1;  // of zeros in its place
  };
  struct Call {
    c10::OperatorHandle op;
    const c10::FunctionSchema* schema;  // of what the plan names
    const TypedOp* typed;               // null for an op of torch's own
    std::string name;
    std::vector<Operand> operands;
    std::vector<int> results;  // those of lists one by one
    // Where a result is a list: of each result how many tensors it has, -1 for one that is none.
    std::vector<int> counts = {};
    std::vector<Gradient> gradients = {};  // among the values it reads
    std::vector<int> result_ops = {};      // parallel to results: what the gradient belongs to
    // The row of the basic op whose backward it is, if it is one.
    const OpDeclaration* backward_of = nullptr;
    // Gives nothing but gradients in whose place zeros can be made: needless where nobody gave one.
    bool skippable = false;
    // The result that is the gradient of a weight which accumulates, the op of that weight, and
    // the op that puts it into the buffer itself.
    struct Accumulates {
      int result;                // as the op's schema counts
      size_t first;              // among `results`
      std::vector<bool> wanted;  // of each tensor of a list
      int op;
      std::optional<c10::OperatorHandle> into;
      bool later;  // the host runs the call after backward
    };
    std::optional<Accumulates> accumulates = {};
    std::optional<WeightCache::Call> weight_cache_key = {};  // where weights are frozen
    // Where `op` is run_call (op/run_call.h): the call as its text, which takes the tensors alone.
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
  // Notes the metadata of a forward value.
  struct TakeMetadata {
    int value;
    int metadata;
  };
  // Takes a largest magnitude into the state that keeps them.
  struct Record {
    int found;
    int state;
    int64_t place;
  };
  // Casts a gradient to the dtype of its tensor, which a host step decided.
  struct FitDtype {
    int value;
    int metadata;
  };
  // A step that the host language runs; -1 among values stands for None.
  struct HostForward {
    int step;
    std::string name;
    std::vector<int> arguments;
    std::vector<int> results;
    struct OpDtype {
      int parameter = -1;  // decides
      bool autocasts = false;
    };
    std::vector<OpDtype> dtypes;
  };
  struct HostBackward {
    int step;
    std::string name;
    std::vector<Gradient> gradients;
    struct Saved {
      int own_row = -1;  // of what its context kept for itself, or
      std::vector<int> slots = {};
      int dtype = -1;  // of a value in the dtype that a native forward computed in
    };
    std::vector<Saved> saved;  // a row for each op
    struct Result {
      enum class Of : uint8_t { Input, Parameter, ExtraInput };
      int value;  // -1 where nobody wants it
      Of of;
      int op;
      int k = 0;  // position among the parameters or extra inputs of the op
      int metadata = -1;
      bool accumulates = false;
      int previous = -1;  // the sum of gradients that it is added to
    };
    std::vector<Result> results;
    bool skippable = false;
  };
  struct Line {
    std::variant<Call, Cast, Copy, Record, TakeMetadata, FitDtype, HostForward, HostBackward> what;
    std::vector<int> dead = {};  // values nobody reads after it
    int op = 0;                  // the first of its step
  };
  struct Code {
    std::vector<Line> lines;
    int values = 0;
  };

  Plan plan;
  std::vector<OpName> names = {};  // of each op; empty where nobody said
  uint64_t id = handles::next_id();
  bool has_host_steps = false;
  bool accumulates = false;     // a weight's gradient goes into a buffer, or comes later
  bool gives_integers = false;  // an extra output that holds some
  bool random = false;          // draws from torch's generator
  bool only_views = false;      // its one output is its input, or a view of it

  Code forward;
  std::vector<int> inputs;   // main, extra inputs, parameters, states
  std::vector<int> outputs;  // main, extra outputs
  // Of each op: does the host keep what it likes of it, instead of the slots of its declaration?
  std::vector<bool> keeps_own;
  std::vector<int> boundaries;  // the main tensor before each op, and the last
  // Outputs 1 to `constants` come from before all that needs a gradient.
  size_t constants = 0;
  std::vector<int> saved;            // forward values to save, each once
  std::map<Value, int> saved_slots;  // slots and parameters -> position in saved
  // States that backward updates: forward value, backward value. No saved tensors, which hooks may
  // copy, and which nobody may write to.
  std::vector<std::pair<int, int>> updated;
  int metadata = 0;  // that forward takes and backward reads
  // Does backward read metadata although all gradients are there?
  bool always_reads_metadata = false;

  Code backward;
  std::vector<int> output_grads;                // parallel to outputs, without the constants
  std::vector<int> loads;                       // parallel to saved: the backward value, or -1
  std::vector<std::pair<int, int>> more_loads;  // (position in saved, another backward value)
  std::vector<int> input_grads;                 // parallel to inputs; -1 where there is none
  std::vector<bool> views;                      // parallel to input_grads: of other gradients
  std::vector<int> delayed;                     // inputs whose gradients are left for later
  std::shared_ptr<PartialBackwards> parts;      // of backward, made when they are asked for
};

// Throws c10::Error (RuntimeError) for an unknown op, or a call that does not fit the op's schema.
Program compile(const Plan& plan);

// The values that a line reads and writes.
std::vector<int> values_read(const Program::Line& line);
std::vector<int> values_written(const Program::Line& line);
// Does a line of backward need to know what a forward value looked like, beside zeros in place of
// missing gradients?
bool reads_metadata(const Program::Line& line);

// Handle by a group, the cache of texts, and the autograd nodes of its calls.
extern template class Handle<const Program>;
using SharedProgram = Handle<const Program>;
using WeakProgram = WeakHandle<const Program>;
SharedProgram share(Program program);

// The program of a plan's text, which has native steps only. The ones asked for last are kept.
SharedProgram program_for(std::string_view text);
// The program of the same ops without fusions, for tensors with other flags than the plan was made
// for. Kept in the same place.
SharedProgram unfused_program_for(const Program& program, at::TensorList tensors);

c10::IValue to_ivalue(const Attribute& attribute);

}  // namespace transformer_ops
