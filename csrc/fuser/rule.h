#pragma once

#include <algorithm>
#include <functional>
#include <initializer_list>
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

// One entry of a pattern: an op of one of these kinds.
struct PatternOp {
  PatternOp(std::initializer_list<std::string> kinds) : kinds(kinds) {}
  PatternOp(std::vector<std::string> kinds, bool optional = false)
      : kinds(std::move(kinds)), optional(optional) {}

  std::vector<std::string> kinds;
  bool optional = false;
};
inline PatternOp optional_op(std::vector<std::string> kinds) { return {std::move(kinds), true}; }

// A run of basic ops that a rule may take. Entry k of the pattern is op k here; one that is
// optional may be absent, and ops that do nothing may lie between two.
struct Match {
  const Analysis& analysis;
  std::vector<int> places;  // per entry: the op in the list, or -1

  bool has(int k) const { return places[k] >= 0; }
  int first() const {
    return *std::ranges::find_if(places, [](int place) { return place >= 0; });
  }
  int last() const { return *std::ranges::max_element(places); }
  const PlanKey& key() const { return analysis.key(); }
  const OpNode& op(int k) const { return analysis.ops()[places[k]]; }
  const std::string& kind(int k) const { return op(k).kind; }
  // Does op k do nothing at the moment?
  bool is_idle(int k) const { return analysis.is_idle(places[k]); }
  std::span<const TensorMeta> parameters(int k) const { return analysis.parameters(places[k]); }
  // Does parameter i of op k want a gradient?
  bool parameter_requires_grad(int k, int i) const {
    return analysis.parameter_requires_grad(places[k], i);
  }
  bool parameter_requires_grad(int k, const std::string& parameter) const {
    return analysis.parameter_requires_grad(places[k], parameter);
  }
  // Does anybody want the gradient of the first op's input?
  bool input_requires_grad() const { return analysis.needs_grad(first()); }
  // Does the caller or another op see the extra output of op k?
  bool extra_output_is_read(int k) const { return analysis.extra_output_is_read(places[k], 0); }
};

// Where a schema field of a fused op comes from when its name alone does not say.
struct Field {
  int op;            // of the match
  std::string name;  // a slot, a parameter, or "extra_output"
};
using Bindings = std::map<std::string, std::variant<Field, Attribute>>;

// What becomes of a step of backward where a recipe has its product take rounded operands.
enum class UnderRecipe {
  Refused,   // the rule takes no such product
  OneCall,   // its own call takes the rounded operands; each gradient may be asked for on its own
  EachCall,  // the calls of its ops follow each other in one step
};

// One fused op: what, when not and why, with what. The driver scans; matching never mutates.
struct Rule {
  std::string name;
  Pass pass;
  int benefit;
  // The ops it covers, two at least where some are optional. It takes as many as it can.
  std::vector<PatternOp> pattern;
  // The reason why not, or none.
  std::function<std::optional<std::string>(const Match&)> why_not = {};
  // Of an optional op that is absent, a `Tensor?` is None and a gradient is not wanted; `bind` has
  // to name what is to stand for its attributes.
  std::string forward = {};
  std::string backward = {};
  std::function<Bindings(const Match&)> bind = {};
  // Whether there is a <forward>_scaled (<backward>_scaled), for operands that come with a scale.
  bool scalable = false;
  UnderRecipe under_recipe = UnderRecipe::Refused;  // in backward

  Schema forward_schema = {};
  Schema backward_schema = {};
};

}  // namespace transformer_ops
