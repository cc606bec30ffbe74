#include "fuser/registry.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <span>
#include <tuple>

#include "fuser/declaration.h"
#include "fuser/error.h"
#include "fuser/fork_safe_mutex.h"
#include "fuser/recompute.h"

namespace transformer_ops {
namespace {

struct Registry {
  ForkSafeMutex mutex;
  std::atomic<int64_t> version = 0;
  std::atomic<int> user_fusions = 0;
  std::atomic<void (*)()> listener = nullptr;
  int64_t next_id = 1;
  int64_t first_order = 0;
  int64_t last_order = 0;
  std::vector<Fusion> fusions;
  // Rules are never deleted: a plan that is being made may still use a removed one.
  std::vector<std::unique_ptr<const Rule>> rules;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

auto sort_key(const Fusion& fusion) {
  const bool is_rule = fusion.rule != nullptr;
  const int64_t order = is_rule ? -fusion.rule->benefit : fusion.order;
  return std::make_tuple(fusion.pass, is_rule, order, is_rule ? fusion.name : std::string());
}

int64_t add(Registry& all, Fusion fusion) {
  fusion.id = all.next_id++;
  const int64_t id = fusion.id;
  all.fusions.push_back(std::move(fusion));
  std::ranges::sort(all.fusions, {}, sort_key);
  return id;
}

void check_pattern(const Rule& rule) {
  const auto has_to_be_there = [](const PatternOp& op) { return !op.optional; };
  check(std::ranges::any_of(rule.pattern, has_to_be_there), "[fusion] pattern of '", rule.name,
        "' must have an op that is not optional, got ", rule.pattern.size(), " entries");
  for (const PatternOp& op : rule.pattern) {
    check(!op.kinds.empty(), "[fusion] each entry of the pattern of '", rule.name,
          "' must name a kind, got none");
  }
}

// Whether an op that the call covers has the field, as far as their kinds are declared.
bool may_have_field(const Rule& rule, const std::string& name) {
  const int last = rule.recomputed < 0 ? std::ssize(rule.pattern) - 1 : rule.recomputed;
  const auto covered = std::span(rule.pattern).first(last + 1);
  return std::ranges::any_of(covered, [&](const PatternOp& op) {
    return std::ranges::any_of(op.kinds, [&](const std::string& kind) {
      return !is_declared(kind) || has_field(declaration(kind), name);
    });
  });
}

// Checks what can be known without a match. `bind` may give other fields; plans check what it
// gives.
void check_recompute(const Rule& rule) {
  const Schema& schema = rule.recompute_schema;
  if (schema.empty()) return;
  const std::string place = "[fusion] recompute of '" + rule.name + "' must ";
  check(!rule.forward_schema.empty(), place, "belong to a rule with a forward, got none");
  check(rule.recomputed < std::ssize(rule.pattern), place,
        "be for an entry of the pattern, got entry ", rule.recomputed, " of ", rule.pattern.size());
  check(schema.results.size() == 1 && schema.has_result("output"), place,
        "return 'output' alone, got '", rule.recompute, "'");
  if (rule.bind) return;
  for (const Schema::Field& field : schema.arguments) {
    const bool is_given = field.name == "input" || field.name == "grad_output";
    check(is_given || may_have_field(rule, field.name), place, "bind '", field.name,
          "', or take what an op that it covers has, got neither");
  }
}

// The registry must be locked.
void check_name(const Registry& all, const Rule& rule) {
  const bool taken = std::ranges::any_of(all.fusions, [&](const Fusion& row) {
    return row.rule && row.name == rule.name && row.pass == rule.pass;
  });
  check(!taken, "[fusion] name must be new in its pass, got '", rule.name, "'");
}

Rule with_schemas(Rule rule) {
  rule.forward_schema = parse_schema(rule.forward);
  rule.backward_schema = parse_schema(rule.backward);
  rule.recompute_schema = parse_schema(rule.recompute);
  check_recompute(rule);
  return rule;
}

int64_t add_checked(Rule rule, std::string origin) {
  check_pattern(rule);
  rule = with_schemas(std::move(rule));
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  check_name(all, rule);
  all.rules.push_back(std::make_unique<const Rule>(std::move(rule)));
  const Rule* kept = all.rules.back().get();
  return add(all, {.name = kept->name, .pass = kept->pass, .origin = origin, .rule = kept});
}

}  // namespace

const char* to_text(Pass pass) {
  switch (pass) {
    case Pass::Joint:
      return "forward_backward";
    case Pass::Forward:
      return "forward";
    case Pass::Backward:
      return "backward";
  }
  return "";
}

std::vector<Fusion> fusions() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.fusions;
}

std::vector<Fusion> fusions(Pass pass) {
  std::vector<Fusion> rows = fusions();
  std::erase_if(rows, [&](const Fusion& row) { return row.pass != pass || row.suspended > 0; });
  return rows;
}

Rule checked(Rule rule) {
  check_pattern(rule);
  const std::lock_guard lock(registry().mutex);
  check_name(registry(), rule);
  return with_schemas(std::move(rule));
}

__attribute__((noinline)) int64_t add_rule(Rule rule, std::optional<std::string> origin) {
  if (!origin) origin = origin_of(__builtin_return_address(0));
  const int64_t id = add_checked(std::move(rule), std::move(*origin));
  touch_registry();
  return id;
}

int64_t add_user_fusion(std::string name, Pass pass, std::string origin, bool prepend,
                        std::vector<PatternOp> pattern) {
  Registry& all = registry();
  int64_t id = 0;
  {
    const std::lock_guard lock(all.mutex);
    const int64_t order = prepend ? --all.first_order : ++all.last_order;
    id = add(all, {.name = name,
                   .pass = pass,
                   .origin = origin,
                   .order = order,
                   .pattern = std::move(pattern)});
    ++all.user_fusions;
  }
  touch_registry();
  return id;
}

bool remove_fusion(int64_t id) {
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    const auto row = std::ranges::find(all.fusions, id, &Fusion::id);
    if (row == all.fusions.end()) return false;
    if (row->rule == nullptr) --all.user_fusions;
    all.fusions.erase(row);
  }
  touch_registry();
  return true;
}

bool suspend_fusion(int64_t id, int by) {
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    const auto row = std::ranges::find(all.fusions, id, &Fusion::id);
    if (row == all.fusions.end()) return false;
    row->suspended += by;
  }
  touch_registry();
  return true;
}

bool has_user_fusions() { return registry().user_fusions > 0; }

int64_t registry_version() { return registry().version; }

void touch_registry() {
  Registry& all = registry();
  ++all.version;
  if (const auto listener = all.listener.load()) listener();
}

void set_registry_listener(void (*listener)()) { registry().listener = listener; }

std::string origin_of(const void* code) {
  Dl_info mine, theirs;
  if (dladdr(reinterpret_cast<const void*>(&registry), &mine) == 0 || dladdr(code, &theirs) == 0)
    return "C++ extension";
  if (mine.dli_fbase == theirs.dli_fbase) return kBuiltIn;
  return std::filesystem::path(theirs.dli_fname).filename().string();
}

}  // namespace transformer_ops
