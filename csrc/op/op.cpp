#include "op/op.h"

#include <mutex>

#include "fuser/fork_safe_mutex.h"
#include "fuser/registry.h"
#include "op/defaults.h"

namespace transformer_ops {
namespace {

using Replay = std::function<Tensor(const ReplayCall&)>;

// A library that brings more may be loaded while others run.
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

// "aten::reshape" is torch's own; an empty schema hands the tensor on.
bool is_ours(const TypedOp& op) {
  return !op.schema.empty() && op.schema.find("::") == std::string::npos;
}

void register_pair(TypedOp forward, TypedOp backward) {
  const auto name_of = [](const TypedOp& op) {
    return is_ours(op) ? parse_schema(op.schema).name : std::string();
  };
  const std::string first = name_of(forward), second = name_of(backward);
  if (!first.empty()) register_typed_op(std::move(forward));
  if (!second.empty()) register_typed_op(std::move(backward));
  if (!first.empty()) add_typed_op_pair({first, second});
  if (!second.empty()) add_typed_op_pair({second, ""});
}

}  // namespace

bool register_op(Op op) {
  const bool follows = op.backward.schema.empty() && !op.declaration.slots.empty();
  if (follows && op.forward.unfused) op.backward = default_backward(op.declaration, op.forward);
  op.declaration.forward = op.forward.schema;
  op.declaration.backward = op.backward.schema;
  op.declaration.recompute = op.recompute.schema;
  if (op.replay) add_replay(op.declaration.kind, std::move(op.replay));
  if (!op.declaration.kind.empty()) add_declaration(std::move(op.declaration));
  register_pair(std::move(op.forward), std::move(op.backward));
  register_pair(std::move(op.recompute), {});
  return true;
}

const Replay& find_replay(const std::string& kind) {
  static const Replay none;
  const std::lock_guard lock(replays().mutex);
  const auto row = replays().rows.find(kind);
  return row == replays().rows.end() ? none : row->second;
}

__attribute__((noinline)) bool register_fused_op(FusedOp op) {
  op.rule.forward = op.forward.schema;
  op.rule.backward = op.backward.schema;
  add_rule(std::move(op.rule), origin_of(__builtin_return_address(0)));
  register_pair(std::move(op.forward), std::move(op.backward));
  return true;
}

}  // namespace transformer_ops
