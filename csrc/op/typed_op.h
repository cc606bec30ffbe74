#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "op/body.h"

namespace transformer_ops {

// What computes a typed op.
struct Bodies {
  // Where one is absent, the decomposition runs on that device.
  Body cpu = {};
  Body cuda = {};
  // Oracle, double backward, torch.func. Absent where the op is the backward of another.
  Decomposition decomposition = {};
};

// A product of rows with a matrix, for a count of operations (op/flops.h). A backward has two: one
// for result grad_<matrix>, and one for the gradient of the rows.
struct Product {
  std::string matrix;  // an argument; all of a list
  // The results of a backward that need the gradient of the rows.
  std::vector<std::string> needed_for = {"grad_input"};
};

struct Products {
  std::vector<Product> list = {};
  // The argument or result that has every row that is multiplied. Empty: the first result of a
  // forward, the first argument of a backward.
  std::string rows = {};
  bool rows_are_numbers = false;  // each number of `rows` stands for one
};

// One torch.ops.transformer_ops.<name>: functional, no result aliases an argument. One of another
// library has a schema "<library>::<name>(...)" and is torch.ops.<library>.<name>.
struct TypedOp {
  std::string schema = {};
  // That tensors are there and on one device, the frame has checked before. Where absent, one
  // result is like the first tensor (op/defaults.h).
  ShapeRule shape = {};
  // Arguments whose memory the first result may take, by name and in this order: one that nobody
  // else holds, of the result's size and dtype. Their elements are read before the same ones are
  // written.
  std::vector<std::string> overwrites = {};
  // The arguments whose strides the bodies follow, by name; they get every other one contiguous.
  std::vector<std::string> any_strides = {};
  // The products with matrices in forward, or those whose gradients a backward computes. Without
  // them FLOP counters take the op for one that multiplies none. Where the op has `splits`, groups
  // of rows have a matrix each.
  Products products = {};
  Bodies bodies = {};
  bool random = false;      // draws from torch's generator
  bool reads_first = true;  // false: the first tensor only ties the op to backward
  // false: no gradient passes through, and where autograd would record one, a call raises.
  bool differentiable = true;
  // Where the calls of a region share what they make of weights (executor/frozen_weights.h): ops of
  // one name, but for a first tensor that ties to backward, give the same for the same arguments.
  std::string makes = {};
  // Result 1 is the gradient of a weight, and the bodies put it where call.main_grad() says. Then
  // there is also <name>_into(..., Tensor(a!) main_grad, bool overwrite), without that result.
  bool accumulates = false;
  // A product whose operands may come as multiples of what they stand for, as the codes of a
  // quantized tensor do: then there is also <name>_scaled(..., Tensor? left_scale,
  // Tensor? right_scale), without a gradient, and the bodies multiply by what call.scales() says.
  // Backward is asked for one of its two products at a time. Operands may be codes of FP8, too: the
  // result is bfloat16 then, and the CPU's body gets their values in it. On CUDA codes may have a
  // scale for each block, which the shape rule compares with them (wrappers/linear.h has one).
  bool scalable = false;
  // The tensor arguments that have a row for each row of the results, where that row of the results
  // depends on no other one of theirs; the first result is not the gradient of a parameter. Then
  // plans may also call <name>.rounded and <name>.rounded_by (op/rounded.h), whose first result is
  // rounded to a format in the same pass. Empty: they may not.
  std::vector<std::string> by_rows = {};
};

// Registers schema, CPU and CUDA kernel, and the shape rule as Meta kernel. Raises where a function
// is not what the schema says, and where `any_strides` or `overwrites` names no tensor argument.
void register_typed_op(TypedOp op);

// Registers an op that plans alone call: torch has no schema of it, and it is reached by
// transformer_ops::run_call (op/run_call.h).
void register_plan_op(TypedOp op);

// What else register_typed_op registers: <name>_into, <name>_scaled, <name>_scaled_into.
std::vector<std::string> other_names(const std::string& name, const TypedOp& op);

// Has the CUDA bodies serve tensors of another device type too: a backend that stands in for CUDA.
void register_cuda_bodies(c10::DispatchKey key);

// The typed ops with a body for the CPU and none for CUDA.
std::vector<std::string> typed_ops_without_cuda();

// The ops that plans alone call: what register_plan_op has registered.
std::vector<std::string> plan_ops();

// By the name in its schema; null where there is none. Ops that round their first result are made
// when they are first asked for.
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

// Gradients of `function` at `inputs`, themselves differentiable; undefined where it does not
// depend on one, and where one holds integers.
Tensors differentiate(c10::function_ref<Tensor(const Tensors&)> function, const Tensors& inputs,
                      const Tensor& grad_output);

// The same for a function with a parameter for each input.
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
