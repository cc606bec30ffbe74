#include "op/op.h"

#include <mutex>

#include "fuser/fork_safe_mutex.h"
#include "fuser/registry.h"
#include "op/defaults.h"

namespace transformer_ops {
namespace {

using Replay = std::function<Tensor(const ReplayCall&)>;

// The replays by kind. The lock is for libraries loaded while others run.
struct Replays {
  ForkSafeMutex mutex;
  std::map<std::string, Replay> rows;
};

Replays& replays() {
  static Replays replays;
  return replays;
}

void add_replay(const std::string& kind, Replay replay) {
  const std::lock_guard lock(replays().mutex);
  replays().rows[kind] = std::move(replay);
}

// Does the op belong to the library? "aten::reshape" is torch's own; an empty schema returns its
// input.
bool belongs_to(const std::string& library, const std::string& name) {
  const size_t colons = name.find("::");
  return colons == std::string::npos || name.substr(0, colons) == library;
}

// An op that only backward steps of plans call.
void register_recompute(const std::string& library, TypedOp op) {
  const std::string name = parse_schema(op.schema).name;
  if (!name.empty() && belongs_to(library, name)) register_plan_op(std::move(op));
}

void register_pair(const std::string& library, TypedOp forward, TypedOp backward) {
  const auto name_of = [&](const TypedOp& op) {
    const std::string name = parse_schema(op.schema).name;
    return belongs_to(library, name) ? name : std::string();
  };
  const std::string first = name_of(forward), second = name_of(backward);
  if (!first.empty()) register_typed_op(std::move(forward));
  if (!second.empty()) register_typed_op(std::move(backward));
  if (!first.empty()) add_typed_op_pair({first, second});
  if (!second.empty()) add_typed_op_pair({second, ""});
}

}  // namespace

void derive_backward(Op& op) {
  const bool follows = op.backward.schema.empty() && !op.declaration.slots.empty();
  if (follows && op.forward.bodies.decomposition)
    op.backward = default_backward(op.declaration, op.forward);
}

void register_op(const std::string& library, Op op) {
  derive_backward(op);
  op.declaration.forward = op.forward.schema;
  op.declaration.backward = op.backward.schema;
  op.declaration.recompute = op.recompute.schema;
  op.declaration.scalable = op.forward.scalable && op.backward.scalable;
  if (op.replay) add_replay(op.declaration.kind, std::move(op.replay));
  if (!op.declaration.kind.empty()) add_declaration(std::move(op.declaration));
  register_pair(library, std::move(op.forward), std::move(op.backward));
  register_recompute(library, std::move(op.recompute));
}

bool register_op(Op op) {
  register_op(kBuiltIn, std::move(op));
  return true;
}

const Replay& find_replay(const std::string& kind) {
  static const Replay none;
  const std::lock_guard lock(replays().mutex);
  const auto row = replays().rows.find(kind);
  return row == replays().rows.end() ? none : row->second;
}

void register_fused_op(const std::string& library, FusedOp op) {
  op.rule.forward = op.forward.schema;
  op.rule.backward = op.backward.schema;
  op.rule.recompute = op.recompute.schema;
  op.rule.scalable = op.rule.pass == Pass::Backward ? op.backward.scalable : op.forward.scalable;
  register_pair(library, std::move(op.forward), std::move(op.backward));
  register_recompute(library, std::move(op.recompute));
  // This comes last, because plans may call the typed ops from now on.
  add_rule(std::move(op.rule), library);
}

__attribute__((noinline)) bool register_fused_op(FusedOp op) {
  register_fused_op(origin_of(__builtin_return_address(0)), std::move(op));
  return true;
}

}  // namespace transformer_ops
