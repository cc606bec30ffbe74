// Activations whose rows are scaled, for the basic ops and the fused ops that contain one:
// y = scales[row] act(x).
#pragma once

#include "wrappers/glu.h"

namespace transformer_ops {

struct ScaledRow {
  std::string kind;             // of the op
  std::string name;             // of the typed op, and as an attribute of fused ops
  const GluRow* glu = nullptr;  // null: SReLU
};

const std::vector<ScaledRow>& scaled_activations();

// A row with its numbers.
struct ScaledActivation {
  const ScaledRow& row;
  cpu::Glu glu = {};

  // Elements of a row of x for one of y.
  int64_t factor() const { return row.glu != nullptr ? 2 : 1; }
};

// As fused ops take one: by the arguments of kGluArguments, of which the first is its name. They
// have no numbers of SReLU's.
ScaledActivation scaled_of(const Checks& check, const GluArguments& arguments);
Bindings bind_scaled(const Match& match, int k);
std::vector<std::string> scaled_kinds();

// The result. Raises where a width, a number or the scales do not fit.
TensorSpec scaled_output(const Checks& check, const ScaledActivation& activation,
                         const Tensor& input, const Tensor& scales);

// Its parts: what the activation makes of `name`, and the scales of the rows of an input.
TensorSpec activated_output(const Checks& check, const char* name, const TensorSpec& input,
                            const ScaledActivation& activation);
void check_row_scales(const Checks& check, const Tensor& scales, const Tensor& input);

Tensor scaled_decomposed(const ScaledActivation& activation, const Tensor& input,
                         const Tensor& scales);
void scaled_forward_cpu(const ScaledActivation& activation, const Tensor& input,
                        const Tensor& scales, const Tensor& output);
// The same for matrices, where `scales` is a column in the accumulate dtype.
void scaled_rows_forward_cpu(const ScaledActivation& activation, const Tensor& input,
                             const Tensor& scales, const Tensor& output);
void scaled_forward_cuda(const ScaledActivation& activation, const Tensor& input,
                         const Tensor& scales, const Tensor& output);

// An undefined grad_scales is not computed. An undefined grad_input is only memory to compute in.
void scaled_backward_cpu(const ScaledActivation& activation, const Tensor& grad_output,
                         const Tensor& input, const Tensor& scales, Tensor grad_input,
                         const Tensor& grad_scales);
// `buffer`, the gradient of y, takes y. `scales` and `sums`, which take the gradients of the
// scales, are columns in the accumulate dtype. All are matrices.
void scaled_value_and_backward_cpu(const ScaledActivation& activation, const Tensor& buffer,
                                   const Tensor& input, const Tensor& scales,
                                   const Tensor& grad_input, const Tensor& sums);
void scaled_backward_cuda(const ScaledActivation& activation, const Tensor& grad_output,
                          const Tensor& input, const Tensor& scales, Tensor grad_input,
                          const Tensor& grad_scales);

}  // namespace transformer_ops
