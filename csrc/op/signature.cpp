#include "op/signature.h"

#include <algorithm>
#include <optional>

#include "fuser/schema.h"
#include "op/buffer.h"

namespace transformer_ops {
namespace {

// Returns 2 for "bool[2]".
std::optional<size_t> list_size(const std::string& type) {
  const size_t open = type.find('[');
  if (open == std::string::npos || type[open + 1] == ']') return std::nullopt;
  return std::stoul(type.substr(open + 1));
}

void check_tensor(const char* op, const std::string& name, const at::Tensor& tensor,
                  c10::Device device) {
  TORCH_CHECK(tensor.device() == device, "[", op, "] tensors must be on one device, got ", device,
              " and ", tensor.device(), " for ", name);
  TORCH_CHECK(device.is_meta() || tensor.unsafeGetTensorImpl()->storage_initialized(), "[", op,
              "] ", name, " must have its memory, got a storage of 0 bytes for shape ",
              tensor.sym_sizes());
}

}  // namespace

Signature::Signature(const std::string& schema, const std::vector<std::string>& any_strides) {
  const Schema parsed = parse_schema(schema);
  name_ = parsed.name;
  for (size_t i = 0; i < parsed.arguments.size(); ++i) {
    const auto& [type, name, _] = parsed.arguments[i];
    if (type.starts_with("Tensor")) {
      (type.ends_with("[]") ? tensor_lists_ : tensors_).push_back({i, name, type.ends_with('?')});
      const bool is_written = type.find('!') != std::string::npos;
      if (!is_written && !std::ranges::count(any_strides, name)) contiguous_.push_back(i);
    } else if (const auto size = list_size(type)) {
      lists_.push_back({i, name, *size});
    }
  }
  const bool has_tensor = !tensors_.empty() || !tensor_lists_.empty();
  TORCH_CHECK(has_tensor, "[", parsed.name, "] schema must have a tensor argument, got '", schema,
              "'");
  const bool begins_with_list = !tensor_lists_.empty() && tensor_lists_.front().index == 0;
  first_ =
      begins_with_list || tensors_.empty() ? tensor_lists_.front().index : tensors_.front().index;
  for (const auto& name : any_strides) {
    const bool is_known = std::ranges::count(tensors_, name, &TensorArgument::name) ||
                          std::ranges::count(tensor_lists_, name, &TensorArgument::name);
    TORCH_CHECK(is_known, "[", name_, "] any_strides must name tensor arguments, got '", name, "'");
  }
}

size_t Signature::index_of(const std::string& tensor, const char* field) const {
  const auto row = std::ranges::find(tensors_, tensor, &TensorArgument::name);
  TORCH_CHECK(row != tensors_.end() && !row->optional, "[", name_, "] ", field,
              " must name tensor arguments, got '", tensor, "'");
  return row->index;
}

void Signature::check(const char* op, std::span<c10::IValue> values) const {
  const auto is_given = [&](size_t i) {
    return values[i].isTensor() && values[i].toTensor().defined();
  };
  if (!tensor_lists_.empty()) check_lists_are_full(op, values);
  for (const auto& [index, name, optional] : tensors_) {
    if (is_given(index)) {
      check_tensor(op, name, values[index].toTensor(), first_tensor(values).device());
    } else {
      TORCH_CHECK(optional, "[", op, "] ", name, " must be a tensor, got None");
    }
  }
  if (!tensor_lists_.empty()) check_lists(op, values);
  for (const auto& [index, name, size] : lists_) {
    const size_t got = values[index].toListRef().size();
    TORCH_CHECK(got == size, "[", op, "] ", name, " must have ", size, " elements, got ", got);
  }
}

// This runs first, because the first tensor may be in a list.
void Signature::check_lists_are_full(const char* op, std::span<c10::IValue> values) const {
  for (const auto& [index, name, _] : tensor_lists_) {
    // An AOTInductor package passes None for an empty list.
    if (values[index].isNone()) values[index] = c10::List<at::Tensor>();
    const auto list = values[index].toListRef();
    TORCH_CHECK(index != first_ || !list.empty(), "[", op, "] ", name,
                " must have a tensor, got an empty list");
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string element = name + "[" + std::to_string(i) + "]";
      TORCH_CHECK(list[i].isTensor() && list[i].toTensor().defined(), "[", op, "] ", element,
                  " must be a tensor, got None");
    }
  }
}

void Signature::check_lists(const char* op, std::span<c10::IValue> values) const {
  for (const auto& [index, name, _] : tensor_lists_) {
    const auto list = values[index].toListRef();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string element = name + "[" + std::to_string(i) + "]";
      check_tensor(op, element, list[i].toTensor(), first_tensor(values).device());
    }
  }
}

void Signature::make_contiguous(std::span<c10::IValue> values) const {
  for (const size_t i : contiguous_) {
    if (values[i].isTensorList()) make_contiguous(values[i]);
    if (!values[i].isTensor()) continue;
    const at::Tensor& tensor = values[i].toTensor();
    if (tensor.defined() && !tensor.is_contiguous()) values[i] = contiguous(tensor);
  }
}

void Signature::make_contiguous(c10::IValue& value) {
  const auto is_contiguous = [](const c10::IValue& item) {
    return item.toTensor().is_contiguous();
  };
  const auto list = value.toListRef();
  if (std::ranges::all_of(list, is_contiguous)) return;
  std::vector<at::Tensor> copies;
  for (const c10::IValue& item : list) copies.push_back(contiguous(item.toTensor()));
  value = std::move(copies);
}

}  // namespace transformer_ops
