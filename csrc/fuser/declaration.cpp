#include "fuser/declaration.h"

#include <algorithm>

#include "fuser/error.h"

namespace transformer_ops {
namespace {

std::map<std::string, OpDeclaration>& rows() {
  static std::map<std::string, OpDeclaration> rows;
  return rows;
}

}  // namespace

const std::map<std::string, OpDeclaration>& declarations() { return rows(); }

bool is_declared(const std::string& kind) { return rows().contains(kind); }

const OpDeclaration& declaration(const std::string& kind) {
  check(is_declared(kind), "[plan] op kind must be declared, got '", kind, "'");
  return rows().at(kind);
}

void add_declaration(OpDeclaration row) {
  check(!is_declared(row.kind), "[declaration] op kind must be declared once, got '", row.kind,
        "'");
  row.forward_schema = parse_schema(row.forward);
  row.backward_schema = parse_schema(row.backward);
  row.recompute_schema = parse_schema(row.recompute);
  rows().emplace(row.kind, std::move(row));
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
