// Toy ops and rules. These tests link only the fuser, which knows no ops of its own.
#pragma once

#include <string>
#include <vector>

#include "fuser/error.h"
#include "fuser/planner.h"
#include "fuser/registry.h"

namespace transformer_ops::toy {

//   Square   saves its input                Product  a weight; saves what is needed
//   Tally    a weight, whose gradient goes into a state if `tallies`
//   Blend    lists of 3 weights and of 3 shifts, which may be one or none
//   Shift    a bias                         Scale    saves nothing
//   Norm     saves input and a statistic    Mask     saves a bit mask, only when training
//   Same     hands on                       View     reads the shape of its input in backward
//   Root     saves its output
//   Add      an extra input                 Fork     an extra output
//   Pick     rows and integers as extra inputs, a table; rows and table may be None
//   Groups   a product of groups of rows, which a recipe rounds
//   Router   floating and integer extra outputs
//   Spread   larger than its input, which is saved to compute it again
//   Choose   hands on, and gives integers
OpNode node(const std::string& kind);
OpNode python_node(const std::string& kind, int parameters = 0);
std::vector<OpNode> nodes(const std::vector<std::string>& kinds);

// Feeds extra input 0 of ops[input] from extra output 0 of ops[output].
void connect(std::vector<OpNode>& ops, int output, int input, bool visible = false);

// All tensors are float32 and, with `grad`, require a gradient; all ops are in training mode.
PlanKey key(const std::vector<OpNode>& ops, bool grad = true);
// The metadata of an op's first parameter.
TensorMeta& parameter(PlanKey& key, const std::vector<OpNode>& ops, int op);

Plan plan(const std::vector<OpNode>& ops);
Plan plan(const std::vector<OpNode>& ops, const PlanKey& key);

// The part of a plan's text from `first_backward` on.
std::string steps_text(const Plan& plan);

// The slots that forward saves, without parameters.
std::string saved_slots(const Plan& plan);

// The message of the PlanError that `function` throws.
template <typename Function>
std::string error_of(Function&& function) {
  try {
    function();
  } catch (const PlanError& error) {
    return error.what();
  }
  return "no error";
}

// Registers a rule during its own lifetime.
class ScopedRule {
 public:
  explicit ScopedRule(Rule rule) : id_(add_rule(std::move(rule), "test")) {}
  ~ScopedRule() { remove_fusion(id_); }
  ScopedRule(const ScopedRule&) = delete;
  ScopedRule& operator=(const ScopedRule&) = delete;

 private:
  int64_t id_;
};

class ScopedUserFusion {
 public:
  ScopedUserFusion(const std::string& name, Pass pass, bool prepend = false,
                   std::vector<PatternOp> pattern = {})
      : id_(add_user_fusion(name, pass, "test", prepend, std::move(pattern))) {}
  ~ScopedUserFusion() { remove_fusion(id_); }
  ScopedUserFusion(const ScopedUserFusion&) = delete;
  ScopedUserFusion& operator=(const ScopedUserFusion&) = delete;

 private:
  int64_t id_;
};

Rule forward_rule();   // Product, Shift, Square
Rule backward_rule();  // Shift, Square
Rule joint_rule();     // Square, Product

}  // namespace transformer_ops::toy
