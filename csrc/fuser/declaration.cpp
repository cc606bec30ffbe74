#include "fuser/declaration.h"

#include <algorithm>
#include <mutex>

#include "fuser/error.h"
#include "fuser/fork_safe_mutex.h"

namespace transformer_ops {
namespace {

// A library that declares more may be loaded while others plan.
struct Declarations {
  ForkSafeMutex mutex;
  std::map<std::string, OpDeclaration> rows;
};

Declarations& all() {
  static Declarations all;
  return all;
}

const OpDeclaration* find(const std::string& kind) {
  const std::lock_guard lock(all().mutex);
  const auto row = all().rows.find(kind);
  return row == all().rows.end() ? nullptr : &row->second;
}

}  // namespace

const std::map<std::string, OpDeclaration>& declarations() { return all().rows; }

bool is_declared(const std::string& kind) { return find(kind) != nullptr; }

const OpDeclaration& declaration(const std::string& kind) {
  const OpDeclaration* row = find(kind);
  check(row != nullptr, "[plan] op kind must be declared, got '", kind, "'");
  return *row;
}

void add_declaration(OpDeclaration row) {
  row.forward_schema = parse_schema(row.forward);
  row.backward_schema = parse_schema(row.backward);
  row.recompute_schema = parse_schema(row.recompute);
  const std::lock_guard lock(all().mutex);
  const std::string kind = row.kind;
  const bool is_new = all().rows.emplace(kind, std::move(row)).second;
  check(is_new, "[declaration] op kind must be declared once, got '", kind, "'");
}

int64_t slot_bits(const OpDeclaration& row, const std::string& slot, int64_t width,
                  int64_t element_bits) {
  if (std::ranges::find(row.parameters, slot) != row.parameters.end()) return 0;
  if (row.slot_bits) return row.slot_bits(slot, width, element_bits);
  const bool is_tensor = slot == "input" || slot == "output";
  if (!is_tensor && slot != "mask") return std::max<int64_t>(32, element_bits);
  if (width < 0) return -1;
  return is_tensor ? width * element_bits : width;
}

}  // namespace transformer_ops
