#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "op/body.h"

namespace transformer_ops {

// The functions that compute a typed op.
struct Bodies {
  // If one is absent, the decomposition runs on that device.
  Body cpu = {};
  Body cuda = {};
  // The oracle in tests, double backward and torch.func use it. It is absent if the op is the
  // backward of another one.
  Decomposition decomposition = {};
};

// A product of rows with a matrix, for FLOP counters (op/flops.h). A backward has two: one for
// result grad_<matrix>, and one for the gradient of the rows.
struct Product {
  std::string matrix;  // an argument; all tensors of a list
  // The results of a backward that need the gradient of the rows.
  std::vector<std::string> needed_for = {"grad_input"};
};

struct Products {
  std::vector<Product> list = {};
  // The argument or result that has all the rows to multiply. If empty, it is the first result of a
  // forward, or the first argument of a backward.
  std::string rows = {};
  bool rows_are_numbers = false;  // each number of `rows` stands for one row
  // The number of products of all rows of `input` with each other, in heads: each takes
  // num_heads * head_dim multiplications for two rows.
  int of_heads = 0;
};

// One torch.ops.transformer_ops.<name>: functional, no result aliases an argument. An op of another
// library has a schema "<library>::<name>(...)" and is torch.ops.<library>.<name>.
struct TypedOp {
  std::string schema = {};
  // The frame has checked before that all tensors exist and are on one device. Without a shape
  // rule, the one result is like the first tensor (op/defaults.h).
  ShapeRule shape = {};
  // The arguments whose memory the first result may reuse, by name and in order of preference. An
  // argument is reused if it has no other reference and the result's size and dtype. Each of its
  // elements is read before the same element is written.
  std::vector<std::string> overwrites = {};
  // The arguments that need not be contiguous, by name. Kernel wrappers follow their strides.
  std::vector<std::string> any_strides = {};
  // The matrix products of forward, or those that a backward computes gradients of. Without them,
  // FLOP counters count nothing for the op. If the op has `splits`, every group of rows has its own
  // matrix.
  Products products = {};
  Bodies bodies = {};
  bool random = false;      // draws from torch's generator
  bool reads_first = true;  // false: the first tensor only ties the op to backward
  // false: the op has no gradient. A call raises if autograd would record one. Plans may then also
  // call <name>.saved in backward (op/recompute.h).
  bool differentiable = true;
  // <name>.saved omits the last result, a tensor; kernel wrappers then get an undefined one.
  bool last_in_forward = false;
  // The calls of a region share what the op, or <name>.saved, makes from the same weights
  // (executor/frozen_weights.h).
  bool is_shared = false;
  // Result 1 is the gradient of a weight, which goes to call.main_grad() if that is set. Such an op
  // also has <name>_into(..., Tensor(a!) main_grad, bool overwrite), without that result.
  bool accumulates = false;
  // A product whose operands may have scales, as the codes of a quantized tensor do. Such an op
  // also has <name>_scaled(..., Tensor? left_scale, Tensor? right_scale), without a gradient;
  // kernel wrappers multiply by call.scales(). Backward computes one of its two products at a time.
  // Operands may also be FP8 codes. The result is bfloat16 then, and the CPU's kernel wrapper gets
  // their bfloat16 values. On CUDA, codes may have block scales, which the shape rule checks (for
  // example in wrappers/linear.h).
  bool scalable = false;
  // The tensor arguments that have a row for each row of the results, if that row depends on no
  // other row of theirs. The first result must not be the gradient of a parameter. Plans may then
  // also call <name>.rounded and <name>.rounded_by (op/rounded.h), which round the first result in
  // the same pass. If empty, they may not.
  std::vector<std::string> by_rows = {};
};

// Registers the schema, the CPU and CUDA kernels, and the shape rule as Meta kernel. Raises if a
// function does not match the schema, or if `any_strides` or `overwrites` names no tensor argument.
void register_typed_op(TypedOp op);

// Registers an op that only plans call. It has no schema in torch; transformer_ops::run_call
// reaches it (op/run_call.h).
void register_plan_op(TypedOp op);

// The other names that register_typed_op registers: <name>_into, <name>_scaled, <name>_scaled_into.
std::vector<std::string> other_names(const std::string& name, const TypedOp& op);

// Registers the CUDA kernel wrappers for another device type too, of a backend that stands in for
// CUDA.
void register_cuda_bodies(c10::DispatchKey key);

// The typed ops that have a CPU kernel wrapper, but none for CUDA.
std::vector<std::string> typed_ops_without_cuda();

// The ops that only plans call, which register_plan_op has registered.
std::vector<std::string> plan_ops();

// Finds an op by the name in its schema; returns null if there is none. Ops that round their first
// result, and ops for saved tensors, are made when they are first looked up.
const TypedOp* find_typed_op(const std::string& name);

// The names of a forward typed op and of its backward, which is empty if it has none.
struct TypedOpPair {
  std::string forward;
  std::string backward;
};
std::vector<TypedOpPair> typed_op_pairs();
// The forward whose backward an op is; empty if it is not a backward.
std::string forward_of(const std::string& backward);
// Registers a pair; both ops must be registered.
void add_typed_op_pair(TypedOpPair pair);

// `make` adds autograd kernels to the pairs that have none yet. It runs before the first gradient
// of each op, because a library that is loaded later adds more pairs.
void set_autograd_maker(std::function<void()> make);

// Does forward-mode AD track the tensor?
bool has_tangent(const Tensor& tensor);

// The gradients of `function` at `inputs`, which are differentiable themselves. A gradient is
// undefined if `function` does not depend on its input, or if the input holds integers.
Tensors differentiate(c10::function_ref<Tensor(const Tensors&)> function, const Tensors& inputs,
                      const Tensor& grad_output);

// The same for a function that has a parameter for each input.
template <typename Function, typename... Inputs>
std::array<Tensor, sizeof...(Inputs)> gradients(const Function& function, const Tensor& grad_output,
                                                const Inputs&... inputs) {
  const auto of_list = [&]<size_t... I>(std::index_sequence<I...>) {
    const auto grads = differentiate([&](const Tensors& list) { return function(list[I]...); },
                                     {inputs...}, grad_output);
    return std::array<Tensor, sizeof...(Inputs)>{grads[I]...};
  };
  return of_list(std::index_sequence_for<Inputs...>());
}

}  // namespace transformer_ops
