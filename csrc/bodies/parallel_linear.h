// Split products with their collectives beside them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bodies/collective.h"
#include "fuser/rule.h"
#include "op/op.h"

namespace transformer_ops {

// How many rows there are when those of `input` are gathered, or sums of as many scattered. They
// raise where there is no dimension of rows, and where it does not fit.
c10::SymInt gathered_rows(const Checks& check, const Tensor& input, int64_t ranks);
c10::SymInt scattered_rows(const Checks& check, const Tensor& input, int64_t ranks);

// A run of the first dimension.
struct Chunk {
  int64_t first, count;
};
// Those in which a collective of `rows` goes beside products: one at least, and no more than are
// worth a product and a collective of their own.
std::vector<Chunk> chunks_of(const Tensor& rows);

// input W^T [+ b] into `output`, all contiguous.
void parallel_product(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& output);

// grad_output W.
Tensor parallel_input_gradient(const Tensor& grad_output, const Tensor& weight);
// grad_output^T input into `grad_weight`, or added to it where the call says so; and the column
// sums of grad_output into `grad_bias`, where that is defined.
void parallel_weight_gradient(const Call& call, const Tensor& grad_output, const Tensor& input,
                              const Tensor& grad_weight, Tensor grad_bias);

// Why a rule of a product (op k of the match) and its bias does not fire, or none.
std::optional<std::string> different_bias_dtype(const Match& match, int product);

// What differs between the backward rules of {a collective}{BasicLinear}[{Bias}]. Bodies get the
// fields of Tensor grad_output, Tensor input, Tensor weight, int group_size, str group,
// bool with_bias, and give grad_input, grad_weight and grad_bias.
struct ParallelBackward {
  std::string name;
  std::string collective;  // the kind of its op
  ShapeRule shape;
  Bodies bodies;
};
FusedOp make_rule(ParallelBackward parts);

}  // namespace transformer_ops
