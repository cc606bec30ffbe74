// What a typed op knows of its call: checks that name the op, and the sizes and dtypes of results.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace transformer_ops {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// Size and dtype of one result; the device is that of the first tensor argument.
struct TensorSpec {
  c10::SymDimVector sizes;
  at::ScalarType dtype;
  // Of a result `Tensor[]`, those of its tensors; the fields above say nothing then.
  std::optional<std::vector<TensorSpec>> list = {};
};
using TensorSpecs = c10::SmallVector<TensorSpec, 4>;

// The numbers by which the operands of a product are to be multiplied, one each or one for each
// block of its codes; undefined: by 1.
struct OperandScales {
  Tensor left = {}, right = {};

  bool defined() const { return left.defined() || right.defined(); }
  // Both together, of scales on the CPU, which are one each.
  double factor() const;
};
// Those of blocks have dimensions: the rows and columns of the blocks or, of pairs of codes, one
// with those and the 4 bytes of a float32.
inline bool is_of_blocks(const Tensor& scale) { return scale.defined() && scale.dim() > 0; }

// Each raises `[op] name must RULE, got VALUE`.
class Checks {
 public:
  // takes_codes: operands of a product may be codes of FP8.
  explicit Checks(const char* op, bool takes_codes = false, OperandScales scales = {})
      : op_(op), takes_codes_(takes_codes), scales_(std::move(scales)) {}

  // Names the op in an error text.
  const char* op() const { return op_; }
  const OperandScales& scales() const { return scales_; }

  // float16, bfloat16, float32 or float64.
  void compute_dtype(const char* name, const Tensor& tensor) const;
  // The same, or codes where the product takes them.
  void operand_dtype(const char* name, const Tensor& tensor) const;
  void same_sizes(const char* name, const Tensor& tensor, const Tensor& like) const;
  // This size and dtype: gradients and saved tensors.
  void spec(const char* name, const Tensor& tensor, const TensorSpec& spec) const;
  void has_rows(const char* name, const Tensor& tensor) const;
  // The trailing dimensions must be those of `trailing`.
  void trailing(const char* name, const Tensor& tensor, const Tensor& trailing) const;

 private:
  const char* op_;
  bool takes_codes_;
  OperandScales scales_;
};

// Codes of FP8, or pairs of FP4; and what a product of such an operand has: bfloat16 of codes.
bool is_codes(at::ScalarType dtype);
at::ScalarType product_dtype(const Tensor& operand);
// Pairs of codes of FP4: of two numbers that follow each other along the sum, the first one lowest.
bool has_pairs(const Tensor& operand);

TensorSpec like(const Tensor& tensor);
// Of a list; nobody wants one without tensors.
TensorSpec list_of(std::vector<TensorSpec> specs);
TensorSpec like(const Tensors& list);
// Of a result that nobody wants.
TensorSpec absent(at::ScalarType dtype);
// One number per row over the last `dims` dimensions: float32, or float64 for float64.
TensorSpec row_statistics(const Tensor& tensor, int64_t dims = 1);
// One bit an element.
TensorSpec bit_mask(const Tensor& tensor);

// What kernels compute in: float32, or float64 for float64.
at::ScalarType accumulate_dtype(at::ScalarType dtype);
Tensor to_accumulate(const Tensor& tensor);
// `tensor` in another dtype; raises where it has no compute dtype.
Tensor cast_floating(const char* op, const Tensor& tensor, at::ScalarType dtype);

// Of rows that have one, for an error text.
template <typename Rows>
std::string names_of(const Rows& rows) {
  std::string text;
  for (const auto& row : rows) text += (text.empty() ? "" : ", ") + row.name;
  return text;
}

}  // namespace transformer_ops
