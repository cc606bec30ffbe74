#include "ops/op.h"

#include "fuser/registry.h"

namespace transformer_ops {
namespace {

using Replay = std::function<Tensor(const ReplayCall&)>;

std::map<std::string, Replay>& replays() {
  static std::map<std::string, Replay> replays;
  return replays;
}

// "aten::reshape" is torch's own; an empty schema hands the tensor on.
bool is_ours(const TypedOp& op) {
  return !op.schema.empty() && op.schema.find("::") == std::string::npos;
}

void register_pair(TypedOp forward, TypedOp backward) {
  if (is_ours(forward)) {
    const bool paired = is_ours(backward);
    add_typed_op_pair({parse_schema(forward.schema).name,
                       paired ? parse_schema(backward.schema).name : std::string()});
    register_typed_op(std::move(forward));
  }
  if (is_ours(backward)) {
    add_typed_op_pair({parse_schema(backward.schema).name, ""});
    register_typed_op(std::move(backward));
  }
}

}  // namespace

bool register_op(Op op) {
  op.declaration.forward = op.forward.schema;
  op.declaration.backward = op.backward.schema;
  op.declaration.recompute = op.recompute.schema;
  if (op.replay) replays()[op.declaration.kind] = op.replay;
  if (!op.declaration.kind.empty()) add_declaration(std::move(op.declaration));
  register_pair(std::move(op.forward), std::move(op.backward));
  register_pair(std::move(op.recompute), {});
  return true;
}

const Replay& find_replay(const std::string& kind) {
  static const Replay none;
  const auto row = replays().find(kind);
  return row == replays().end() ? none : row->second;
}

bool register_fused_op(FusedOp op) {
  op.rule.forward = op.forward.schema;
  op.rule.backward = op.backward.schema;
  add_rule(std::move(op.rule));
  register_pair(std::move(op.forward), std::move(op.backward));
  return true;
}

}  // namespace transformer_ops
