// What a typed op knows about its call: checks that name the op, and the sizes and dtypes of
// results.
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
  // The tensors of a result `Tensor[]`; the fields above are unused then.
  std::optional<std::vector<TensorSpec>> list = {};
};
using TensorSpecs = c10::SmallVector<TensorSpec, 4>;

// The scales of a product's operands, each a number or one number for each block of codes. An
// undefined scale is 1.
struct OperandScales {
  Tensor left = {}, right = {};

  bool defined() const { return left.defined() || right.defined(); }
  // The product of both scales, which must be single numbers on the CPU.
  double factor() const;
};
// Does the scale have a number for each block? Such a scale has dimensions: the rows and columns of
// the blocks or, for pairs of codes, one dimension with those and the 4 bytes of a float32.
inline bool is_of_blocks(const Tensor& scale) { return scale.defined() && scale.dim() > 0; }

// Each check raises `[op] name must RULE, got VALUE`.
class Checks {
 public:
  // takes_codes: operands of a product may be FP8 codes.
  explicit Checks(const char* op, bool takes_codes = false, OperandScales scales = {})
      : op_(op), takes_codes_(takes_codes), scales_(std::move(scales)) {}

  // The name of the op in error texts.
  const char* op() const { return op_; }
  const OperandScales& scales() const { return scales_; }

  // The dtype must be float16, bfloat16, float32 or float64.
  void compute_dtype(const char* name, const Tensor& tensor) const;
  // The same check, but codes pass if the product takes them.
  void operand_dtype(const char* name, const Tensor& tensor) const;
  void same_sizes(const char* name, const Tensor& tensor, const Tensor& like) const;
  // The tensor must have this size and dtype. Gradients and saved tensors are checked so.
  void spec(const char* name, const Tensor& tensor, const TensorSpec& spec) const;
  void has_rows(const char* name, const Tensor& tensor) const;
  // The trailing dimensions must be those of `trailing`.
  void trailing(const char* name, const Tensor& tensor, const Tensor& trailing) const;

 private:
  const char* op_;
  bool takes_codes_;
  OperandScales scales_;
};

// Is it a dtype of FP8 codes or of pairs of FP4 codes? A product of such operands has bfloat16
// results.
bool is_codes(at::ScalarType dtype);
at::ScalarType product_dtype(const Tensor& operand);
// Does it hold pairs of FP4 codes? A pair is two numbers that follow each other along the sum; the
// first one has the low bits.
bool has_pairs(const Tensor& operand);

TensorSpec like(const Tensor& tensor);
TensorSpec like(const Tensor& tensor, at::ScalarType dtype);
// The spec of a list, which must not be empty.
TensorSpec list_of(std::vector<TensorSpec> specs);
TensorSpec like(const Tensors& list);
// The spec of a result that is not wanted.
TensorSpec absent(at::ScalarType dtype);
// One number per row over the last `dims` dimensions: float32, or float64 for float64.
TensorSpec row_statistics(const Tensor& tensor, int64_t dims = 1);
// One bit for each element.
TensorSpec bit_mask(const Tensor& tensor);

// The dtype in which kernels compute: float32, or float64 for float64.
at::ScalarType accumulate_dtype(at::ScalarType dtype);
Tensor to_accumulate(const Tensor& tensor);
// Casts `tensor` to another dtype; raises if it has no compute dtype.
Tensor cast_floating(const char* op, const Tensor& tensor, at::ScalarType dtype);

// The names of rows, separated by commas, for an error text.
template <typename Rows>
std::string names_of(const Rows& rows) {
  std::string text;
  for (const auto& row : rows) text += (text.empty() ? "" : ", ") + row.name;
  return text;
}

}  // namespace transformer_ops
