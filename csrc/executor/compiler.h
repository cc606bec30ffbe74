// A plan -> the lines that the interpreter runs.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "executor/numbering.h"
#include "executor/program.h"
#include "fuser/declaration.h"

namespace transformer_ops {

// Compiles one plan. Steps of the host language are in compile_host_steps.cpp.
class Compiler {
 public:
  explicit Compiler(const Plan& plan);
  Program run();

 private:
  // The value that each extra input of an op reads; none if it is optional and None.
  std::vector<std::optional<Value>> extra_inputs(int op) const;
  void compile_forward();
  static void mark_lines(Program::Code& code, size_t first_line, const Step& step);
  void compile_backward();
  void note_delays();
  // The first op that a backward step covers.
  int first_live_op() const;
  void compile_step(const Step& step, Numbering& values, Program::Code& code);
  void compile_cast(const std::string& step, const Instruction& instruction, Numbering& values,
                    Program::Code& code);
  void compile_instruction(const Instruction& instruction, Numbering& values, Program::Code& code);
  // The op may be called in another form, such as that for operands with scales.
  static const OpDeclaration* backward_of(const std::string& target);
  // The parameter that a slot saves, if it saves one.
  Value origin(const Value& value) const;
  static void note_counts(const Instruction& instruction, Program::Call& call);
  // Is it a state that is passed with the parameters?
  bool is_given(const Value& value) const;
  // The index is that of the call's scale, which is the argument after it.
  Program::Record record(const Instruction& instruction, const Value& state, int found,
                         Numbering& values);
  void hand_over(const Instruction& instruction, Numbering& values, Program::Code& code);
  static void check_written(const Value& value, int index);
  Program::Operand operand(const Argument& argument, Numbering& values);
  void note_saves(const Step& step, Numbering& values);
  // The backward value of a slot or parameter. The first use makes forward save it.
  int load(const Value& value);

  // ---- steps of the host language
  void compile_host_forward(const Step& step);
  std::vector<std::string> slots_of(int op) const;
  Program::HostForward::OpDtype dtype_of(int op) const;
  void compile_host_backward(const Step& step);
  using Of = Program::HostBackward::Result::Of;
  void add_extra_grad(const std::optional<Value>& source, Program::HostBackward::Result result,
                      Program::HostBackward& call);
  void add_result(const Value& value, bool is_wanted, Program::HostBackward::Result result,
                  Program::HostBackward& call);
  Program::HostBackward::Saved saved_of(int op);
  // The metadata that shows which dtype the forward step of a native op computed in; -1 if the host
  // ran that step.
  int dtype_metadata(int op);
  const State& row_of(const Value& state) const;
  void note_accumulation(const Instruction& instruction, Program::Call& call);
  void fit_dtype(const Value& gradient);

  // ---- gradients and metadata
  static bool is_gradient(const Value& value);
  Program::Gradient gradient(const Value& value);
  // The number of the metadata of a forward value; -1 if forward does not compute the value.
  int metadata_of(const Value& value);

  Program program_;
  const std::set<Value> gradients_;             // the gradients that backward returns
  std::vector<std::vector<Value>> parameters_;  // for each op
  std::map<Value, Value> feeds_;                // extra input -> the value that it reads
  Numbering forward_;
  int first_parameter_ = 0;  // its number in forward; the other parameters follow it
  Numbering backward_;
  MetadataNumbers metadata_;            // for forward values
  std::map<Value, int> sources_;        // slot -> forward value
  std::map<int, int> given_gradients_;  // gradient of the main output -> that forward value
  bool may_lack_gradients_ = false;
  int forward_step_ = 0;  // the number of host steps so far
  int backward_step_ = 0;
};

}  // namespace transformer_ops
