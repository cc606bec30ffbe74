#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fuser/rule.h"

namespace transformer_ops {

// One fusion: a built-in or C++ rule, or a user's: a pattern, or a function that rewrites the list
// of ops itself.
struct Fusion {
  int64_t id = 0;
  std::string name = {};
  Pass pass = Pass::Joint;
  std::string origin = {};     // "built-in", or the C++ library or Python module that brought it
  int64_t order = 0;           // among users' fusions; they run before the rules
  const Rule* rule = nullptr;  // null for a user's
  // Where a user's fusion applies; none for a function that rewrites the list itself. The kinds are
  // names for people: what an op is, the host language says.
  std::vector<PatternOp> pattern = {};
  int suspended = 0;  // while above zero no plan uses it
};

// All fusions in the order they run: by pass, users' by order, rules by (benefit descending, name).
std::vector<Fusion> fusions();
// Those of one pass that are not suspended.
std::vector<Fusion> fusions(Pass pass);

// The rule with its schemas parsed. Throws PlanError for a name that its pass has, and for a
// pattern without an op that has to be there.
Rule checked(Rule rule);
// Adds the checked rule. The origin, if none is given, is the library that calls.
int64_t add_rule(Rule rule, std::optional<std::string> origin = {});
int64_t add_user_fusion(std::string name, Pass pass, std::string origin, bool prepend,
                        std::vector<PatternOp> pattern = {});
// False if it was gone already.
bool remove_fusion(int64_t id);
// Adds to the times it is suspended; false if it was removed.
bool suspend_fusion(int64_t id, int by);

// Grows with every change; a plan made under another version is stale.
int64_t registry_version();
// Makes all plans stale: something they depend on has changed.
void touch_registry();
// Has `listener` called after every change, by the thread that made it: it may be loading a
// library.
void set_registry_listener(void (*listener)());

// The origin of what this library brings itself.
inline constexpr const char* kBuiltIn = "built-in";
// kBuiltIn for code of this library, else the file name of the library that `code` belongs to.
std::string origin_of(const void* code);

}  // namespace transformer_ops
