// Split products with their collectives beside them.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fuser/rule.h"
#include "op/op.h"
#include "wrappers/collective.h"

namespace transformer_ops {

// How many rows there are when those of `input` are gathered, or sums of as many scattered. They
// raise where there is no dimension of rows, and where it does not fit.
c10::SymInt gathered_rows(const Checks& check, const Tensor& input, int64_t ranks);
c10::SymInt scattered_rows(const Checks& check, const Tensor& input, int64_t ranks);

// A run of the first dimension of what each rank has.
struct Chunk {
  int64_t first, count;
};
// Those in which a collective of `rows` goes beside products: one at least, and no more than are
// worth a product and a collective of their own. The first and the last are small, as the
// collective of the one and the product of the other have nothing beside them.
std::vector<Chunk> chunks_of(const Tensor& rows, const Ranks& ranks, int64_t least_rows);
// A product has at least as many rows of all ranks: MKL takes longer for a row where there are
// fewer, and adds in another order there, where the weight is not transposed.
inline constexpr int64_t kLeastRows = 128, kLeastRowsOfGradient = 256;

// The rows of a chunk among those of all ranks, rank by rank: [ranks, count, ...].
Tensor rows_of_ranks(const Tensor& whole, const Ranks& ranks, const Chunk& chunk);

// input W^T [+ b] into `output`, all contiguous.
void parallel_product(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& output);
// grad_output W into `grad_input`, likewise.
void parallel_input_gradient(const Tensor& grad_output, const Tensor& weight,
                             const Tensor& grad_input);

// Gathers `input` in chunks, each beside `product(rows, into)` of the one before. `output`, if it
// is defined, gets the results of all ranks' rows, and `whole`, if it is defined, the rows. The
// chunks are the same in every case, so that ranks that ask for different results gather alike.
void gather_beside(const Checks& check, const Tensor& input, const Ranks& ranks, int64_t least_rows,
                   Tensor whole, const Tensor& output,
                   const std::function<void(const Tensor&, const Tensor&)>& product);

// grad_output^T input into `grad_weight`, or added to it where the call says so; and the column
// sums of grad_output into `grad_bias`. Either may be undefined, and is left out then.
void parallel_weight_gradient(const Call& call, const Tensor& grad_output, const Tensor& input,
                              const Tensor& grad_weight, Tensor grad_bias);

// Why a rule of a product (op k of the match) and its bias does not fire, or none.
std::optional<std::string> different_bias_dtype(const Match& match, int product);

// Which of (grad_input, grad_weight, grad_bias) are wanted.
using ParallelMask = std::array<bool, 3>;

// The results of such a backward: `of_product`, then the gradient of the bias. Those that are not
// wanted are empty.
TensorSpecs parallel_outputs(TensorSpecs of_product, const Tensor& grad_output,
                             ParallelMask wanted);

// What differs between the backward rules of a BasicLinear [and a Bias] with a collective before
// them or behind. Bodies get the fields of Tensor grad_output, Tensor input, Tensor weight,
// int group_size, str group, bool[3] output_mask, and give grad_input, grad_weight and grad_bias.
// A collective that only unwanted gradients need does not run: all ranks ask for the same ones, as
// they run the same backward.
struct ParallelBackward {
  std::string name;
  std::vector<PatternOp> pattern;
  std::string rows;  // the argument with all rows that are multiplied
  ShapeRule shape;
  Bodies bodies;
};
FusedOp make_rule(ParallelBackward parts);

}  // namespace transformer_ops
