#include "op/body.h"

#include <algorithm>
#include <optional>

#include "fuser/schema.h"

namespace transformer_ops {

double OperandScales::factor() const {
  const auto number = [](const Tensor& scale) {
    return scale.defined() ? static_cast<double>(*scale.const_data_ptr<float>()) : 1.0;
  };
  return number(left) * number(right);
}

namespace {

template <typename... T>
constexpr std::initializer_list<CppParameter> kTypes = {cpp_parameter<T>()...};

// The C++ type for a schema type. If several fit, this is the first one.
std::string cpp_type(const std::string& schema_type) {
  for (const CppParameter& row :
       kTypes<const Tensor&, const Tensor*, const Tensors&, double, std::optional<double>, int64_t,
              std::optional<int64_t>, c10::SymInt, bool, std::string_view, std::array<bool, 1>,
              std::array<bool, 2>, std::array<bool, 3>, std::array<bool, 4>, std::array<bool, 5>,
              std::vector<int64_t>, std::vector<c10::SymInt>,
              std::optional<std::vector<c10::SymInt>>>) {
    if (row.schema == schema_type) return row.name;
  }
  return "(no C++ type for " + schema_type + ")";
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

bool has_context(const CppParameter* parameters) {
  return parameters->name != nullptr && std::string_view(parameters->name).starts_with("const C");
}

// Does each result of a tuple have the type (tensor or list) that the schema gives it?
bool fits_lists(const CppSignature& got, const Schema& schema) {
  if (got.lists == nullptr) return true;
  for (int i = 0; i < got.results && i < std::ssize(schema.results); ++i) {
    if (got.lists[i] != (schema.results[i].type == "Tensor[]")) return false;
  }
  return true;
}

std::string returned_text(const std::string& returned, const Schema& schema) {
  if (returned != "std::tuple") return returned;
  std::vector<std::string> types;
  for (const auto& result : schema.results) {
    types.emplace_back(result.type == "Tensor[]" ? "Tensors" : "Tensor");
  }
  return "std::tuple<" + join(types) + ">";
}

std::string returned_text(const CppSignature& got) {
  if (std::string_view(got.returned) != "std::tuple") return got.returned;
  std::vector<std::string> types;
  for (int i = 0; i < got.results; ++i) types.emplace_back(got.lists[i] ? "Tensors" : "Tensor");
  return "std::tuple<" + join(types) + ">";
}

// A decomposition may omit results after the first one; a list may have any number of tensors.
bool fits_results(const CppSignature& got, size_t wanted, bool may_leave_out) {
  const auto count = static_cast<size_t>(got.results);
  return got.results == CppSignature::kAny || count == wanted ||
         (may_leave_out && count >= 1 && count < wanted);
}

}  // namespace

void TypedFunction::check(const Schema& schema, const std::string& text, const char* field,
                          bool may_leave_out) const {
  if (signature_ == nullptr) return;
  const CppSignature& got = *signature_;
  const bool fills = std::string_view(got.returned) == "void";
  std::vector<std::string> wanted_types, wanted_texts;
  for (size_t i = skipped_; i < schema.arguments.size(); ++i) {
    const auto& [type, name, _] = schema.arguments[i];
    wanted_types.push_back(type);
    wanted_texts.push_back(cpp_type(type) + " " + name);
  }
  if (fills) {
    for (const auto& result : schema.results) {
      wanted_types.push_back("-> " + result.type);
      wanted_texts.push_back((result.type == "Tensor[]" ? "Tensors& " : "Tensor& ") + result.name);
    }
    if (drops_last_) wanted_types.emplace_back("-> Tensor");
  }
  std::vector<std::string> got_types, got_texts;
  if (has_context(got.parameters)) got_texts.emplace_back(got.parameters->name);
  for (const auto* one = got.parameters + got_texts.size(); one->name != nullptr; ++one) {
    got_types.push_back(one->schema == nullptr ? std::string("-> ") + one->result : one->schema);
    got_texts.emplace_back(one->name);
  }
  if (join(got_types) == join(wanted_types) && fits_lists(got, schema) &&
      fits_results(got, schema.results.size() + (drops_last_ ? 1 : 0),
                   may_leave_out && !drops_last_))
    return;
  std::string returned = got.returned;
  if (returned == "Tensor" || returned == "std::tuple") {
    const bool is_one = schema.results.size() == 1 && schema.results[0].type != "Tensor[]";
    returned = is_one ? "Tensor" : schema.results.size() == 1 ? "Tensors" : "std::tuple";
  }
  TORCH_CHECK(false, "[", schema.name, "] ", field, " must be ", returned_text(returned, schema),
              "(", join(wanted_texts), ") as the schema '", text, "' says, got ",
              returned_text(got), "(", join(got_texts), ")");
}

}  // namespace transformer_ops
