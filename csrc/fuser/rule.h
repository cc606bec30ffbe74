#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "fuser/analysis.h"
#include "fuser/attribute.h"
#include "fuser/declaration.h"
#include "fuser/plan.h"

namespace transformer_ops {

// In the order they run; forward and backward both start from the result of joint.
enum class Pass { Joint, Forward, Backward };
const char* to_text(Pass pass);

// A run of basic ops that a rule may take.
struct Match {
  const Analysis& analysis;
  int first;

  const Facts& facts() const { return analysis.facts(); }
  const OpNode& op(int k) const { return analysis.ops()[first + k]; }
  const std::string& kind(int k) const { return op(k).kind; }
  bool training(int k) const { return facts().training[first + k]; }
  // Does parameter i of op k want a gradient?
  bool parameter_requires_grad(int k, int i) const {
    return analysis.parameter_requires_grad(first + k, i);
  }
  // Does anybody want the gradient of the first op's input?
  bool input_requires_grad() const { return analysis.needs_grad(first); }
  // Does the caller or another op see the extra output of op k?
  bool extra_output_is_read(int k) const { return analysis.extra_output_is_read(first + k, 0); }
};

// Where a schema field of a fused op comes from when its name alone does not say.
struct Field {
  int op;            // counted from the first op of the match
  std::string name;  // a slot, a parameter, or "extra_output"
};
using Bindings = std::map<std::string, std::variant<Field, Attribute>>;

// One fused op: what, when not and why, with what. The driver scans; matching never mutates.
struct Rule {
  std::string name;
  Pass pass;
  int benefit;
  std::vector<std::vector<std::string>> pattern;  // per op: the kinds it may have
  // The reason why not, or none.
  std::function<std::optional<std::string>(const Match&)> why_not = {};
  std::string forward = {};
  std::string backward = {};
  std::function<Bindings(const Match&)> bind = {};

  Schema forward_schema = {};
  Schema backward_schema = {};
};

}  // namespace transformer_ops
