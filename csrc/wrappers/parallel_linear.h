// Split products that overlap with their collectives.
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

// The number of rows after gathering `input`, or after scattering its sums. They raise if there is
// no dimension of rows, or if its size does not fit.
c10::SymInt gathered_rows(const Checks& check, const Tensor& input, int64_t ranks);
c10::SymInt scattered_rows(const Checks& check, const Tensor& input, int64_t ranks);

// A range of the first dimension of each rank's tensor.
struct Chunk {
  int64_t first, count;
};
// The chunks in which a collective of `rows` overlaps with products: at least one, and each large
// enough for a product and a collective of its own. The first and the last chunk are small, because
// the first collective and the last product overlap with nothing.
std::vector<Chunk> chunks_of(const Tensor& rows, const Ranks& ranks, int64_t least_rows);
// The least rows of all ranks in a product. With fewer, MKL takes longer for each row, and adds in
// another order if the weight is not transposed.
inline constexpr int64_t kLeastRows = 128, kLeastRowsOfGradient = 256;

// The rows of a chunk among those of all ranks, rank by rank: [ranks, count, ...].
Tensor rows_of_ranks(const Tensor& whole, const Ranks& ranks, const Chunk& chunk);

// input W^T [+ b] into `output`; all tensors are contiguous.
void parallel_product(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& output);
// grad_output W into `grad_input`; all tensors are contiguous.
void parallel_input_gradient(const Tensor& grad_output, const Tensor& weight,
                             const Tensor& grad_input);

// Gathers `input` in chunks, each while `product(rows, into)` of the one before runs. `output`, if
// defined, receives the results for all ranks' rows, and `whole`, if defined, the rows. The chunks
// do not depend on this, so ranks that need different results gather alike.
void gather_beside(const Checks& check, const Tensor& input, const Ranks& ranks, int64_t least_rows,
                   Tensor whole, const Tensor& output,
                   const std::function<void(const Tensor&, const Tensor&)>& product);

// grad_output^T input into `grad_weight`, or added to it if the call says so; and the column sums
// of grad_output into `grad_bias`. An undefined result is not computed.
void parallel_weight_gradient(const Call& call, const Tensor& grad_output, const Tensor& input,
                              const Tensor& grad_weight, Tensor grad_bias);

// The reason why a rule for a product (op k of the match) and its bias does not apply, or none.
std::optional<std::string> different_bias_dtype(const Match& match, int product);

// The flags of the wanted results among (grad_input, grad_weight, grad_bias).
using ParallelMask = std::array<bool, 3>;

// The results of such a backward: `of_product`, then the gradient of the bias. Results that are not
// wanted are empty.
TensorSpecs parallel_outputs(TensorSpecs of_product, const Tensor& grad_output,
                             ParallelMask wanted);

// The differences between the backward rules of a BasicLinear [and a Bias] with a collective before
// or after them. Kernel wrappers get the fields of Tensor grad_output, Tensor input, Tensor weight,
// int group_size, str group, bool[3] output_mask, and return grad_input, grad_weight and grad_bias.
// A collective that only unwanted gradients need does not run: all ranks want the same gradients,
// because they run the same backward.
struct ParallelBackward {
  std::string name;
  std::vector<PatternOp> pattern;
  std::string rows;  // the argument with all rows of the product
  ShapeRule shape;
  Bodies bodies;
};
FusedOp make_rule(ParallelBackward parts);

}  // namespace transformer_ops
