#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fuser/rule.h"

namespace transformer_ops {

// One fusion: a built-in or C++ rule, or a user's pattern, or a user's function that rewrites the
// list of ops.
struct Fusion {
  int64_t id = 0;
  std::string name = {};
  Pass pass = Pass::Joint;
  std::string origin = {};     // "built-in", or the C++ library or Python module that added it
  int64_t order = 0;           // among users' fusions, which run before the rules
  const Rule* rule = nullptr;  // null for a user's fusion
  // Where a user's pattern applies; empty for a function that rewrites the list. The kinds are only
  // shown: the host language decides whether an op fits.
  std::vector<PatternOp> pattern = {};
  int suspended = 0;  // no plan uses the fusion while this is above zero
};

// All fusions in the order they run: by pass, users' by order, rules by (benefit descending, name).
std::vector<Fusion> fusions();
// The fusions of one pass that are not suspended.
std::vector<Fusion> fusions(Pass pass);

// The rule with its schemas parsed. Throws PlanError if the name is taken in its pass, or if all
// ops of the pattern are optional.
Rule checked(Rule rule);
// Adds the checked rule. The default origin is the library that calls this function.
int64_t add_rule(Rule rule, std::optional<std::string> origin = {});
int64_t add_user_fusion(std::string name, Pass pass, std::string origin, bool prepend,
                        std::vector<PatternOp> pattern = {});
// Returns false if the fusion was already removed.
bool remove_fusion(int64_t id);
// Adds `by` to the fusion's `suspended`; returns false if it was removed.
bool suspend_fusion(int64_t id, int by);

// Is a user's fusion registered? It may read the training flag of any op.
bool has_user_fusions();

// Increases with every change. A plan made under another version is stale.
int64_t registry_version();
// Makes all plans stale, because something they depend on has changed.
void touch_registry();
// Sets a function that is called after every change, on the thread that made the change, which may
// be loading a library.
void set_registry_listener(void (*listener)());

// The origin of this library's own fusions.
inline constexpr const char* kBuiltIn = "built-in";
// kBuiltIn for code of this library, else the file name of the library that contains `code`.
std::string origin_of(const void* code);

}  // namespace transformer_ops
