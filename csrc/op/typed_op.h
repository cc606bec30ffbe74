#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

namespace transformer_ops {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// Where the gradient of a weight goes instead of into a result.
struct MainGrad {
  Tensor buffer = {};  // undefined: there is none
  bool adds = false;   // to what is there; else it takes its place
};

// The arguments of one call of a typed op, in schema order.
class Args {
 public:
  Args(const char* op, std::span<c10::IValue> values, MainGrad main_grad = {})
      : op_(op), values_(values), main_grad_(std::move(main_grad)) {}

  // Names the op in an error text.
  const char* op() const { return op_; }
  std::span<c10::IValue> values() const { return values_; }
  const c10::IValue& operator[](size_t i) const { return values_[i]; }

  const Tensor& tensor(size_t i) const { return values_[i].toTensor(); }
  // Takes an argument out of the call, so that its memory is free once the body lets go of it.
  Tensor take(size_t i) const { return std::move(values_[i]).toTensor(); }
  bool has(size_t i) const { return values_[i].isTensor() && values_[i].toTensor().defined(); }
  // Undefined where the argument is None.
  Tensor optional(size_t i) const { return has(i) ? tensor(i) : Tensor(); }
  double number(size_t i) const { return values_[i].toDouble(); }
  int64_t integer(size_t i) const { return values_[i].toInt(); }
  bool flag(size_t i) const { return values_[i].toBool(); }
  std::string_view text(size_t i) const { return values_[i].toStringView(); }
  // Element k of a bool[] argument.
  bool flag(size_t i, size_t k) const { return values_[i].toListRef()[k].toBool(); }
  const MainGrad& main_grad() const { return main_grad_; }

 private:
  const char* op_;
  std::span<c10::IValue> values_;
  MainGrad main_grad_;
};

// Size and dtype of one result; the device is that of the first tensor argument.
struct TensorSpec {
  c10::SymDimVector sizes;
  at::ScalarType dtype;
};
using TensorSpecs = c10::SmallVector<TensorSpec, 4>;

// One torch.ops.transformer_ops.<name>: functional, no result aliases an argument.
struct TypedOp {
  std::string schema = {};
  // Checks the arguments ([op] what RULE, got VALUE), then gives the results. Sizes may be
  // symbolic. That tensors are there and on one device, the frame has checked before.
  std::function<TensorSpecs(const Args&)> shape = {};
  // Arguments whose memory the first result may take, in this order: one that nobody else holds,
  // of the result's size and dtype. Their elements are read before the same ones are written.
  std::vector<size_t> overwrites = {};
  // The arguments whose strides the bodies follow, by name; they get every other one contiguous.
  std::vector<std::string> any_strides = {};
  // Fill results allocated by `shape`, or replace them. Where one is absent, the unfused meaning
  // runs on that device.
  std::function<void(const Args&, Tensors&)> cpu = {};
  std::function<void(const Args&, Tensors&)> cuda = {};
  // The same as plain differentiable ATen calls: oracle, double backward, torch.func. The results
  // that only serve backward may stay undefined. Absent where the op is the backward of another.
  std::function<Tensors(const Args&)> unfused = {};
  bool random = false;      // draws from torch's generator
  bool reads_first = true;  // false: the first tensor only ties the op to backward
  bool allocates = true;    // false: the bodies make their results
  // false: results never require a gradient, whatever the arguments do.
  bool differentiable = true;
  // Result 1 is the gradient of a weight, and the bodies put it where args.main_grad() says. Then
  // there is also <name>_into(..., Tensor(a!) main_grad, bool overwrite), without that result.
  bool accumulates = false;
};

// Registers schema, CPU and CUDA kernel, and the shape rule as Meta kernel. Raises where
// `any_strides` names no tensor argument.
void register_typed_op(TypedOp op);

// Has the CUDA bodies serve tensors of another device type too: a backend that stands in for CUDA.
void register_cuda_bodies(c10::DispatchKey key);

// The typed ops without a CUDA body.
std::vector<std::string> typed_ops_without_cuda();

// By unqualified name; null where there is none.
const TypedOp* find_typed_op(const std::string& name);

// A forward typed op and the typed op that is its backward, by name; backward empty where none.
struct TypedOpPair {
  std::string forward;
  std::string backward;
};
std::vector<TypedOpPair> typed_op_pairs();
// The forward whose backward an op is; empty where it is none.
std::string forward_of(const std::string& backward);
// Once both are registered.
void add_typed_op_pair(TypedOpPair pair);

// `make` gives autograd kernels to the pairs that have none yet. It runs before the first gradient
// of each op: a library that is loaded late brings more.
void set_autograd_maker(std::function<void()> make);

// Does forward-mode AD follow the tensor?
bool has_tangent(const Tensor& tensor);

// Gradients of the first result of `unfused` for its tensor arguments, themselves differentiable;
// the other arguments get an undefined tensor.
Tensors differentiate(const std::function<Tensors(const Args&)>& unfused, const char* op,
                      std::vector<c10::IValue> arguments, const Tensor& grad_output);

// What kernels compute in, for unfused meanings: float32, or float64 for float64.
Tensor to_accumulate(const Tensor& tensor);

// ---- for shape rules

TensorSpec like(const Tensor& tensor);
// One number per row over the last `dims` dimensions: float32, or float64 for float64.
TensorSpec row_statistics(const Tensor& tensor, int64_t dims = 1);
// One bit an element.
TensorSpec bit_mask(const Tensor& tensor);
at::ScalarType accumulate_dtype(at::ScalarType dtype);

// Of rows that have one, for an error text.
template <typename Rows>
std::string names_of(const Rows& rows) {
  std::string text;
  for (const auto& row : rows) text += (text.empty() ? "" : ", ") + row.name;
  return text;
}

// Raise where the argument is no float16, bfloat16, float32 or float64 tensor.
void check_compute_dtype(const Args& args, const char* name, const Tensor& tensor);
void check_compute_dtype(const char* op, const char* name, const Tensor& tensor);
// `tensor` in another dtype; raises where it was no such tensor before.
Tensor cast_floating(const char* op, const Tensor& tensor, at::ScalarType dtype);
void check_same_sizes(const Args& args, const char* name, const Tensor& tensor, const Tensor& like);
// Raise where the argument has another size or dtype: gradients and saved tensors.
void check_spec(const Args& args, const char* name, const Tensor& tensor, const TensorSpec& spec);
void check_has_rows(const Args& args, const char* name, const Tensor& tensor);
// The trailing dimensions of `tensor` must be those of `trailing`.
void check_trailing(const Args& args, const char* name, const Tensor& tensor,
                    const Tensor& trailing);

}  // namespace transformer_ops
