#include "op/checks.h"

namespace transformer_ops {

void Checks::compute_dtype(const char* name, const Tensor& tensor) const {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "[", op_, "] ", name, " must be float16, bfloat16, float32 or float64, got ", dtype);
}

void Checks::operand_dtype(const char* name, const Tensor& tensor) const {
  if (takes_codes_ && is_codes(tensor.scalar_type())) return;
  compute_dtype(name, tensor);
  TORCH_CHECK(!takes_codes_ || tensor.scalar_type() != at::kHalf, "[", op_, "] ", name,
              " must have at least the exponents of bfloat16 beside a scale, got ",
              tensor.scalar_type());
}

bool is_codes(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2 || dtype == at::kByte;
}

bool has_pairs(const Tensor& operand) { return operand.scalar_type() == at::kByte; }

at::ScalarType product_dtype(const Tensor& operand) {
  return is_codes(operand.scalar_type()) ? at::kBFloat16 : operand.scalar_type();
}

void Checks::same_sizes(const char* name, const Tensor& tensor, const Tensor& like) const {
  TORCH_CHECK(tensor.sym_sizes().equals(like.sym_sizes()), "[", op_, "] ", name,
              " must have shape ", like.sym_sizes(), ", got ", tensor.sym_sizes());
}

void Checks::spec(const char* name, const Tensor& tensor, const TensorSpec& spec) const {
  TORCH_CHECK(tensor.sym_sizes().equals(spec.sizes), "[", op_, "] ", name, " must have shape ",
              c10::SymIntArrayRef(spec.sizes), ", got ", tensor.sym_sizes());
  TORCH_CHECK(tensor.scalar_type() == spec.dtype, "[", op_, "] ", name, " must have dtype ",
              spec.dtype, ", got ", tensor.scalar_type());
}

void Checks::has_rows(const char* name, const Tensor& tensor) const {
  TORCH_CHECK(tensor.dim() >= 1, "[", op_, "] ", name, " must have at least 1 dimension, got 0");
}

void Checks::trailing(const char* name, const Tensor& tensor, const Tensor& trailing) const {
  const auto sizes = tensor.sym_sizes();
  const auto wanted = trailing.sym_sizes();
  // A bias has at least one dimension.
  TORCH_CHECK(!wanted.empty(), "[", op_, "] weight must have at least 1 dimension, got 0");
  TORCH_CHECK(
      sizes.size() >= wanted.size() && sizes.slice(sizes.size() - wanted.size()).equals(wanted),
      "[", op_, "] ", name, " must end in dimensions ", wanted, ", got shape ", sizes);
}

TensorSpec like(const Tensor& tensor) { return like(tensor, tensor.scalar_type()); }

TensorSpec like(const Tensor& tensor, at::ScalarType dtype) {
  return {c10::SymDimVector(tensor.sym_sizes()), dtype};
}

TensorSpec list_of(std::vector<TensorSpec> specs) {
  return {.sizes = {}, .dtype = at::kFloat, .list = std::move(specs)};
}

TensorSpec like(const Tensors& list) {
  std::vector<TensorSpec> specs;
  for (const Tensor& tensor : list) specs.push_back(like(tensor));
  return list_of(std::move(specs));
}

TensorSpec absent(at::ScalarType dtype) { return {{0}, dtype}; }

TensorSpec row_statistics(const Tensor& tensor, int64_t dims) {
  const auto sizes = tensor.sym_sizes();
  return {c10::SymDimVector(sizes.slice(0, sizes.size() - dims)),
          accumulate_dtype(tensor.scalar_type())};
}

TensorSpec bit_mask(const Tensor& tensor) { return {{(tensor.sym_numel() + 7) / 8}, at::kByte}; }

at::ScalarType accumulate_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor to_accumulate(const Tensor& tensor) {
  return tensor.to(accumulate_dtype(tensor.scalar_type()));
}

Tensor cast_floating(const char* op, const Tensor& tensor, at::ScalarType dtype) {
  Checks(op).compute_dtype("input", tensor);
  return tensor.to(dtype);
}

}  // namespace transformer_ops
