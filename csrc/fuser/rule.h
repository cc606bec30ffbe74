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

// The passes in the order they run; forward and backward both start from the result of joint.
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

// A run of basic ops that a rule may take. Entry k of the pattern is op k here. An optional op may
// be absent, and ops that do nothing may lie between two.
struct Match {
  const Analysis& analysis;
  std::vector<int> places;  // for each entry, the op in the list, or -1

  bool has(int k) const { return places[k] >= 0; }
  int first() const {
    return *std::ranges::find_if(places, [](int place) { return place >= 0; });
  }
  int last() const { return *std::ranges::max_element(places); }
  const PlanKey& key() const { return analysis.key(); }
  const OpNode& op(int k) const { return analysis.ops()[places[k]]; }
  const std::string& kind(int k) const { return op(k).kind; }
  // Does op k currently do nothing?
  bool is_idle(int k) const { return analysis.is_idle(places[k]); }
  std::span<const TensorMeta> parameters(int k) const { return analysis.parameters(places[k]); }
  // Does parameter i of op k require a gradient?
  bool parameter_requires_grad(int k, int i) const {
    return analysis.parameter_requires_grad(places[k], i);
  }
  bool parameter_requires_grad(int k, const std::string& parameter) const {
    return analysis.parameter_requires_grad(places[k], parameter);
  }
  // Is the gradient of the first op's input wanted?
  bool input_requires_grad() const { return analysis.needs_grad(first()); }
  // Does the caller or another op see the extra output of op k?
  bool extra_output_is_read(int k) const { return analysis.extra_output_is_read(places[k], 0); }
};

// The source of a schema field of a fused op, if its name alone does not determine it.
struct Field {
  int op;            // an index of the match
  std::string name;  // a slot, a parameter, or "extra_output"
};
using Bindings = std::map<std::string, std::variant<Field, Attribute>>;

// What happens to a backward step if a recipe rounds the operands of its product.
enum class UnderRecipe {
  Refused,   // the rule does not take such a product
  OneCall,   // its own call takes the rounded operands; each gradient may be computed separately
  EachCall,  // the calls of its ops follow each other in one step
};

// One fused op: what it takes, when not and why, and what runs it. Matching never changes anything.
struct Rule {
  std::string name;
  Pass pass;
  int benefit;
  // The ops that it covers: at least two if some are optional. It takes as many as it can.
  std::vector<PatternOp> pattern;
  // The reason why the rule does not apply, or none.
  std::function<std::optional<std::string>(const Match&)> why_not = {};
  // If an optional op is absent, its `Tensor?` arguments are None and its gradients are not wanted;
  // `bind` has to give values for its attributes.
  std::string forward = {};
  std::string backward = {};
  std::function<Bindings(const Match&)> bind = {};
  // Recomputes, in backward and in one call, the output of the entry `recomputed` from what the
  // first op reads. Its fields are named as those of forward; its result is "output".
  std::string recompute = {};
  int recomputed = -1;  // -1: the last entry that is there
  // Does <forward>_scaled (<backward>_scaled) exist, for operands with a scale?
  bool scalable = false;
  UnderRecipe under_recipe = UnderRecipe::Refused;  // for backward

  Schema forward_schema = {};
  Schema backward_schema = {};
  Schema recompute_schema = {};
};

}  // namespace transformer_ops
