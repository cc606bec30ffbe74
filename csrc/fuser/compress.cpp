#include "fuser/compress.h"

#include <algorithm>
#include <map>
#include <set>

#include "fuser/casts.h"
#include "fuser/declaration.h"
#include "fuser/slots.h"

namespace transformer_ops {
namespace {

using Kind = Value::Kind;

constexpr const char* kDecode = "dequantize.saved";

Value part_of(Value slot, Value::Part part) {
  slot.part = part;
  return slot;
}

class Compress {
 public:
  Compress(Plan& plan, const std::vector<DType>& dtypes) : plan_(plan), dtypes_(dtypes) {
    for (const Step& step : plan_.forward) {
      for (const Instruction& instruction : step.instructions) note_aliases(instruction);
    }
    std::set<Value> held;  // values that the caller holds
    if (!plan_.saved.inputs) {
      held = {{Kind::Main, 0}, root({Kind::Main, plan_.size()})};
      for (const Value& output : plan_.extra_outputs) held.insert(root(output));
    }
    for (const Step& step : plan_.forward) {
      for (const Save& save : step.saves) {
        const Value source = root(save.source);
        if (!asks(save.slot) && (format_of(save.slot).is_exact() || held.contains(source))) {
          exact_.insert(source);
        }
      }
    }
  }

  void run() {
    for (Step& step : plan_.forward) rewrite_forward(step);
    for (auto step = plan_.backward.rbegin(); step != plan_.backward.rend(); ++step) {
      if (!step->skipped) rewrite_backward(*step);
    }
    for (Step& step : plan_.forward) {
      std::erase_if(step.saves, [&](const Save& save) { return omitted_.contains(save.slot); });
    }
  }

 private:
  // ---- forward

  void note_aliases(const Instruction& instruction) {
    const bool is_view = instruction.target.empty() || instruction.target == "aten::reshape";
    if (!is_view) return;
    const auto* source = std::get_if<Value>(&instruction.arguments[0]);
    if (source == nullptr) return;
    for_each_value(instruction.results,
                   [&](const Value& result) { roots_[result] = root(*source); });
  }

  // The value whose memory this one aliases.
  Value root(const Value& value) const {
    const auto found = roots_.find(value);
    return found == roots_.end() ? value : found->second;
  }

  void rewrite_forward(Step& step) {
    const auto cast = input_cast(step);
    std::vector<Save> saves;
    for (const Save& save : step.saves) {
      const DType dtype = cast.value_or(dtypes_[save.slot.op]);
      if (!is_compressed(save, dtype)) {
        saves.push_back(save);
        continue;
      }
      const auto [first, is_new] = slots_.try_emplace(root(save.source), save.slot);
      first_slot_[save.slot] = first->second;
      if (!is_new) continue;
      encode(save, step, saves);
      dtype_[save.slot] = dtype;
    }
    step.saves = std::move(saves);
  }

  // An op's own flag applies also to tensors that the caller holds, but not to a tensor that
  // another op saves exactly.
  bool is_compressed(const Save& save, DType dtype) const {
    const Value source = root(save.source);
    if (format_of(save.slot).is_exact() || dtype == DType::Unknown) return false;
    if (source.kind == Kind::Parameter || source.kind == Kind::ExtraInput) return false;
    return !exact_.contains(source);
  }

  bool asks(const Value& slot) const {
    return slot.name == "input" && plan_.ops[slot.op].is_set(kCacheQuantizedInput);
  }

  // The format of a slot; exact if it is not compressed.
  NumberFormat format_of(const Value& slot) const {
    const bool is_main = slot.name == "input" || slot.name == "output";
    if (!is_main) return {};
    if (asks(slot)) return NumberFormat::named("e4m3");
    return codes_of(plan_.saved.format);
  }

  void encode(const Save& save, Step& step, std::vector<Save>& saves) const {
    const Value codes = part_of(save.slot, Value::Part::Codes);
    const Value scale = part_of(save.slot, Value::Part::Scale);
    step.instructions.push_back({.target = "quantize",
                                 .arguments = {save.source, Attribute(format_of(save.slot).name())},
                                 .results = {codes, scale}});
    saves.push_back({codes, codes});
    saves.push_back({scale, scale});
  }

  // ---- backward

  void rewrite_backward(Step& step) {
    std::vector<Instruction> before;
    for (const Value& slot : slots_read(plan_, step)) {
      const auto first = first_slot_.find(slot);
      if (first == first_slot_.end()) continue;
      decode(first->second, step, before);
      // A step may read another slot of the same tensor by that slot's name.
      if (slot != first->second && decoded_.insert(slot).second) {
        before.push_back({.arguments = {first->second}, .results = {slot}});
      }
    }
    step.instructions.insert(step.instructions.begin(), before.begin(), before.end());
    for (Instruction& instruction : step.instructions) omit_slots_of_exact(instruction);
  }

  // Notes what is decoded, or computed again from that; a call that reads it computes the slots
  // again that belong to the exact tensors.
  void omit_slots_of_exact(Instruction& call) {
    bool is_inexact = call.target == kDecode;
    for_each_value(call.arguments,
                   [&](const Value& value) { is_inexact |= inexact_.contains(value); });
    if (!is_inexact) return;
    for_each_value(call.results, [&](const Value& value) {
      if (value.kind == Kind::Main || value.kind == Kind::Slot) inexact_.insert(value);
    });
    for (Argument& argument : call.arguments) {
      const auto* const slot = std::get_if<Value>(&argument);
      if (slot == nullptr || slot->kind != Kind::Slot) continue;
      const auto& slots = declaration(plan_.ops[slot->op].kind).slots;
      const auto row = std::ranges::find(slots, slot->name, &Slot::name);
      if (row == slots.end() || !row->of_exact) continue;
      omitted_.insert(*slot);
      argument = None{};
    }
  }

  // The gradient argument prevents a compiler from moving the decoding to forward.
  void decode(const Value& slot, const Step& step, std::vector<Instruction>& code) {
    if (!decoded_.insert(slot).second) return;
    code.push_back(
        {.target = kDecode,
         .arguments = {Value{Kind::Grad, step.last() + 1}, part_of(slot, Value::Part::Codes),
                       part_of(slot, Value::Part::Scale), Attribute(format_of(slot).name()),
                       Attribute(to_text(dtype_.at(slot))), None{}},
         .results = {slot}});
  }

  Plan& plan_;
  const std::vector<DType>& dtypes_;
  std::map<Value, Value> roots_;
  std::set<Value> exact_;              // roots that are saved exactly
  std::map<Value, Value> slots_;       // root -> the slot whose parts save it
  std::map<Value, Value> first_slot_;  // slot -> the slot of the same root whose parts save it
  std::map<Value, DType> dtype_;       // the dtypes of those slots
  std::set<Value> decoded_;
  std::set<Value> inexact_;  // what backward decodes, and what it computes again from that
  std::set<Value> omitted_;  // slots that are not saved
};

}  // namespace

void compress_saved(Plan& plan, const std::vector<DType>& dtypes) {
  const bool is_asked = std::ranges::any_of(
      plan.ops, [](const PlannedOp& op) { return op.is_set(kCacheQuantizedInput); });
  if (is_asked || !plan.saved.is_exact()) Compress(plan, dtypes).run();
}

}  // namespace transformer_ops
