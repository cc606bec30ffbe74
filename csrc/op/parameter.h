// The C++ types of a kernel wrapper's parameters, and the schema types that they accept.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <optional>
#include <string_view>
#include <vector>

namespace transformer_ops {

// BodyParameter<T>::get reads a parameter of type T from its argument. Only types with a
// specialization here are allowed. A type with kCount takes that many arguments, and get() receives
// the first.
template <typename T>
struct BodyParameter {
  static_assert(sizeof(T) == 0,
                "A parameter of a body or shape rule must have a type of op/parameter.h: const "
                "Tensor& or Tensor, const Tensor* for Tensor?, double for float, int64_t for int, "
                "std::optional of these for float? and int?, std::vector of these for float[] and "
                "int[], bool, std::string_view for str. float, int, at::IntArrayRef and "
                "std::string are none of them.");
};

template <>
struct BodyParameter<const at::Tensor&> {
  static constexpr char kSchema[] = "Tensor", kName[] = "const Tensor&";
  static const at::Tensor& get(c10::IValue& value) { return value.toTensor(); }
};

// The tensor is moved out of the call, so that its memory is freed once the wrapper releases it.
template <>
struct BodyParameter<at::Tensor> {
  static constexpr char kSchema[] = "Tensor", kName[] = "Tensor";
  static at::Tensor get(c10::IValue& value) { return std::move(value).toTensor(); }
};

// Null if the argument is None.
template <>
struct BodyParameter<const at::Tensor*> {
  static constexpr char kSchema[] = "Tensor?", kName[] = "const Tensor*";
  static const at::Tensor* get(c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined() ? &value.toTensor() : nullptr;
  }
};

// A list of tensors, for example those of a listed parameter.
template <>
struct BodyParameter<const std::vector<at::Tensor>&> {
  static constexpr char kSchema[] = "Tensor[]", kName[] = "const Tensors&";
  static std::vector<at::Tensor> get(c10::IValue& value) { return value.toTensorVector(); }
};

// For functions that take an undefined tensor instead of null.
inline at::Tensor or_undefined(const at::Tensor* tensor) {
  return tensor != nullptr ? *tensor : at::Tensor();
}

// The tensor is moved out of the call.
template <>
struct BodyParameter<std::optional<at::Tensor>> {
  static constexpr char kSchema[] = "Tensor?", kName[] = "std::optional<Tensor>";
  static std::optional<at::Tensor> get(c10::IValue& value) {
    if (BodyParameter<const at::Tensor*>::get(value) == nullptr) return std::nullopt;
    return std::move(value).toTensor();
  }
};

template <>
struct BodyParameter<double> {
  static constexpr char kSchema[] = "float", kName[] = "double";
  static double get(c10::IValue& value) { return value.toDouble(); }
};

template <>
struct BodyParameter<std::optional<double>> {
  static constexpr char kSchema[] = "float?", kName[] = "std::optional<double>";
  static std::optional<double> get(c10::IValue& value) {
    return value.isNone() ? std::nullopt : std::optional(value.toDouble());
  }
};

template <>
struct BodyParameter<int64_t> {
  static constexpr char kSchema[] = "int", kName[] = "int64_t";
  static int64_t get(c10::IValue& value) { return value.toInt(); }
};

template <>
struct BodyParameter<std::optional<int64_t>> {
  static constexpr char kSchema[] = "int?", kName[] = "std::optional<int64_t>";
  static std::optional<int64_t> get(c10::IValue& value) {
    return value.isNone() ? std::nullopt : std::optional(value.toInt());
  }
};

template <>
struct BodyParameter<c10::SymInt> {
  static constexpr char kSchema[] = "SymInt", kName[] = "c10::SymInt";
  static c10::SymInt get(c10::IValue& value) { return value.toSymInt(); }
};

template <>
struct BodyParameter<bool> {
  static constexpr char kSchema[] = "bool", kName[] = "bool";
  static bool get(c10::IValue& value) { return value.toBool(); }
};

template <>
struct BodyParameter<std::string_view> {
  static constexpr char kSchema[] = "str", kName[] = "std::string_view";
  static std::string_view get(c10::IValue& value) { return value.toStringView(); }
};

template <size_t N>
struct BodyParameter<std::array<bool, N>> {
  static_assert(N < 10);
  static constexpr char kSchema[] = {'b', 'o', 'o', 'l', '[', '0' + N, ']', '\0'};
  static constexpr char kName[] = {'s', 't', 'd', ':', ':', 'a', 'r', 'r',     'a', 'y',
                                   '<', 'b', 'o', 'o', 'l', ',', ' ', '0' + N, '>', '\0'};
  static std::array<bool, N> get(c10::IValue& value) {
    const auto list = value.toListRef();
    std::array<bool, N> flags;
    for (size_t i = 0; i < N; ++i) flags[i] = list[i].toBool();
    return flags;
  }
};

template <>
struct BodyParameter<std::vector<int64_t>> {
  static constexpr char kSchema[] = "int[]", kName[] = "std::vector<int64_t>";
  static std::vector<int64_t> get(c10::IValue& value) { return value.toIntVector(); }
};

template <>
struct BodyParameter<std::vector<double>> {
  static constexpr char kSchema[] = "float[]", kName[] = "std::vector<double>";
  static std::vector<double> get(c10::IValue& value) { return value.toDoubleVector(); }
};

template <>
struct BodyParameter<const std::vector<int64_t>&> : BodyParameter<std::vector<int64_t>> {
  static constexpr char kName[] = "const std::vector<int64_t>&";
};

template <>
struct BodyParameter<std::vector<c10::SymInt>> {
  static constexpr char kSchema[] = "SymInt[]", kName[] = "std::vector<c10::SymInt>";
  static std::vector<c10::SymInt> get(c10::IValue& value) { return value.toSymIntVector(); }
};

template <>
struct BodyParameter<std::optional<std::vector<c10::SymInt>>> {
  static constexpr char kSchema[] = "SymInt[]?",
                        kName[] = "std::optional<std::vector<c10::SymInt>>";
  static std::optional<std::vector<c10::SymInt>> get(c10::IValue& value) {
    return value.isNone() ? std::nullopt : std::optional(value.toSymIntVector());
  }
};

}  // namespace transformer_ops
