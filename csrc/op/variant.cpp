#include "op/variant.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "fuser/fork_safe_mutex.h"
#include "fuser/schema.h"

namespace transformer_ops {
namespace {

std::string schema_of(const std::string& base, Form form, Schema schema) {
  schema.name = name_of(base, form);
  auto &arguments = schema.arguments, &results = schema.results;
  if (form.is_scaled) {
    arguments.insert(arguments.end(), {{"Tensor?", "left_scale"}, {"Tensor?", "right_scale"}});
  }
  if (form.is_into) {
    const auto weight = std::ranges::find(results, "grad_weight", &Schema::Field::name);
    TORCH_INTERNAL_ASSERT(weight != results.end(), "'grad_weight' in ", to_text(schema));
    const std::string type = weight->type == "Tensor[]" ? "Tensor(a!)[]" : "Tensor(a!)";
    arguments.insert(arguments.end(), {{type, "main_grad"}, {"bool", "overwrite"}});
    results.erase(weight);
    // torch cannot functionalize an op that writes to an argument and returns lists.
    std::erase_if(results, [](const Schema::Field& field) { return field.type == "Tensor[]"; });
  }
  return to_text(schema);
}

std::vector<std::string> taken_as_they_are(const TypedOp& op) {
  std::vector<std::string> names = op.any_strides;
  if (!op.reads_first) names.push_back(parse_schema(op.schema).arguments[0].name);
  return names;
}

struct Variants {
  ForkSafeMutex mutex;
  std::map<std::string, Variant> rows;
};

Variants& variants() {
  static Variants variants;
  return variants;
}

}  // namespace

std::vector<Form> forms_of(const TypedOp& op) {
  std::vector<Form> forms;
  if (op.accumulates) forms.push_back({.is_into = true});
  if (op.scalable) forms.push_back({.is_scaled = true});
  if (op.accumulates && op.scalable) forms.push_back({.is_scaled = true, .is_into = true});
  return forms;
}

std::string name_of(const std::string& base, Form form) {
  return base + (form.is_scaled ? "_scaled" : "") + (form.is_into ? "_into" : "");
}

Variant::Variant(const TypedOp& typed_op, const std::string& base_name, Form its_form)
    : op(typed_op),
      base(base_name),
      name(name_of(base_name, its_form)),
      schema(schema_of(base_name, its_form, parse_schema(op.schema))),
      arguments(parse_schema(schema).arguments.size()),
      signature(schema, taken_as_they_are(op)),
      form(its_form) {
  const Schema own = parse_schema(op.schema);
  const auto is_list = [](const Schema::Field& field) { return field.type == "Tensor[]"; };
  if (std::ranges::any_of(own.results, is_list)) {
    for (const auto& result : own.results) lists.push_back(is_list(result));
  }
  for (const auto& argument : op.overwrites) {
    overwrites.push_back(signature.index_of(argument, "overwrites"));
  }
}

const Variant& keep_variant(const TypedOp& op, const std::string& base, Form form) {
  const std::lock_guard lock(variants().mutex);
  const auto [row, is_new] = variants().rows.try_emplace(name_of(base, form), op, base, form);
  TORCH_CHECK(is_new, "[typed op] name must be new, got '", row->first, "'");
  return row->second;
}

std::vector<const Variant*> all_variants() {
  const std::lock_guard lock(variants().mutex);
  std::vector<const Variant*> found;
  for (const auto& [_, variant] : variants().rows) found.push_back(&variant);
  return found;
}

const Variant* find_variant(const std::string& name) {
  {
    const std::lock_guard lock(variants().mutex);
    const auto row = variants().rows.find(name);
    if (row != variants().rows.end()) return &row->second;
  }
  const TypedOp* const op = find_typed_op(name);
  if (op == nullptr) return nullptr;
  const Variant variant(*op, name, {});
  const std::lock_guard lock(variants().mutex);
  return &variants().rows.emplace(name, variant).first->second;
}

}  // namespace transformer_ops
