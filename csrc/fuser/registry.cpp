#include "fuser/registry.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <tuple>

#include "fuser/error.h"
#include "fuser/fork_safe_mutex.h"

namespace transformer_ops {
namespace {

struct Registry {
  ForkSafeMutex mutex;
  std::atomic<int64_t> version = 0;
  int64_t next_id = 1;
  int64_t first_order = 0;
  int64_t last_order = 0;
  std::vector<Fusion> fusions;
  // Rules stay for the life of the process: a plan being made may still look at a removed one.
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
  ++all.version;
  return id;
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

int64_t add_rule(Rule rule, std::string origin) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const bool taken = std::ranges::any_of(all.fusions, [&](const Fusion& row) {
    return row.rule && row.name == rule.name && row.pass == rule.pass;
  });
  check(!taken, "[fusion] name must be new in its pass, got '", rule.name, "'");
  rule.forward_schema = parse_schema(rule.forward);
  rule.backward_schema = parse_schema(rule.backward);
  all.rules.push_back(std::make_unique<const Rule>(std::move(rule)));
  const Rule* kept = all.rules.back().get();
  return add(all, {.name = kept->name, .pass = kept->pass, .origin = origin, .rule = kept});
}

int64_t add_user_fusion(std::string name, Pass pass, std::string origin, bool prepend) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const int64_t order = prepend ? --all.first_order : ++all.last_order;
  return add(all, {.name = name, .pass = pass, .origin = origin, .order = order});
}

bool remove_fusion(int64_t id) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const bool removed = std::erase_if(all.fusions, [&](auto& row) { return row.id == id; }) > 0;
  if (removed) ++all.version;
  return removed;
}

bool suspend_fusion(int64_t id, int by) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto row = std::ranges::find(all.fusions, id, &Fusion::id);
  if (row == all.fusions.end()) return false;
  row->suspended += by;
  ++all.version;
  return true;
}

int64_t registry_version() { return registry().version; }

void touch_registry() { ++registry().version; }

}  // namespace transformer_ops
