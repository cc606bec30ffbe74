// Products with adapters of low rank (LoRA, Hu et al. 2021): y = x W^T + b + s drop(x) A^T B^T.
#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "op/typed_op.h"

namespace transformer_ops {

// Adapter i adds to the columns of weight of[i]. A is [rank, columns of the input], B is [columns
// of that weight, rank]. All have one dtype, which may differ from that of the product.
struct Adapters {
  const Tensors& a;
  const Tensors& b;
  std::vector<int64_t> of;
  std::vector<double> scales;

  int64_t rank() const;  // that of all together
};

// The flags of the wanted results among (grad_input, grad_weight, grad_bias, grad_a, grad_b).
using AdapterMask = std::array<bool, 5>;
using AdapterBackward = std::tuple<Tensor, Tensors, Tensors, Tensors, Tensors>;

// Raises unless the adapters fit to an input of so many columns, and to weights with so many output
// columns. Returns the rank of all together.
c10::SymInt check_adapters(const Checks& check, const Adapters& adapters,
                           const c10::SymInt& columns_of_input, at::IntArrayRef columns);

// Adds the adapters' products to `output`, [rows, columns of all weights], and returns
// s x [A0; A1; ...]^T. `x` is what the adapters read, [rows, columns of the input].
Tensor add_adapters(const Tensor& output, const Tensor& x, const Adapters& adapters,
                    at::IntArrayRef columns);
// Adds them again from what add_adapters returned.
void add_hidden(const Tensor& output, const Tensor& hidden, const Adapters& adapters,
                at::IntArrayRef columns);

// The gradients of A and B, and, if `grad_x` is defined, that of x, which is added to it. `x` is
// read for A alone, and `hidden` for B. Lists that are not wanted are empty.
std::tuple<Tensors, Tensors> adapters_backward(const Tensor& grad, const Tensor& x,
                                               const Tensor& hidden, const Adapters& adapters,
                                               at::IntArrayRef columns, const Tensor& grad_x);

}  // namespace transformer_ops
