// Activations whose rows are scaled, y = scales[row] act(x), for the basic ops and the fused ops
// that contain one.
#pragma once

#include "wrappers/glu.h"

namespace transformer_ops {

struct ScaledRow {
  std::string kind;             // the kind of the op
  std::string name;             // the name of the typed op, and an attribute of fused ops
  const GluRow* glu = nullptr;  // null for SReLU
};

const std::vector<ScaledRow>& scaled_activations();

// A row with its numbers.
struct ScaledActivation {
  const ScaledRow& row;
  cpu::Glu glu = {};

  // The number of elements of x for each element of y.
  int64_t factor() const { return row.glu != nullptr ? 2 : 1; }
};

// The activation of a fused op, from the arguments of kGluArguments; the first one is its name.
// SReLU has no numbers there.
ScaledActivation scaled_of(const Checks& check, const GluArguments& arguments);
Bindings bind_scaled(const Match& match, int k);
std::vector<std::string> scaled_kinds();

// The spec of the result. Raises if a width, a number or the scales do not fit.
TensorSpec scaled_output(const Checks& check, const ScaledActivation& activation,
                         const Tensor& input, const Tensor& scales);

// The parts of scaled_output(): the activation's result for `name`, and the scales of an input's
// rows.
TensorSpec activated_output(const Checks& check, const char* name, const TensorSpec& input,
                            const ScaledActivation& activation);
void check_row_scales(const Checks& check, const Tensor& scales, const Tensor& input);

Tensor scaled_decomposed(const ScaledActivation& activation, const Tensor& input,
                         const Tensor& scales);
void scaled_forward_cpu(const ScaledActivation& activation, const Tensor& input,
                        const Tensor& scales, const Tensor& output);
// The same for matrices, with `scales` as a column in the accumulate dtype.
void scaled_rows_forward_cpu(const ScaledActivation& activation, const Tensor& input,
                             const Tensor& scales, const Tensor& output);
void scaled_forward_cuda(const ScaledActivation& activation, const Tensor& input,
                         const Tensor& scales, const Tensor& output);

// An undefined grad_scales is not computed. An undefined grad_input only means temporary memory.
void scaled_backward_cpu(const ScaledActivation& activation, const Tensor& grad_output,
                         const Tensor& input, const Tensor& scales, Tensor grad_input,
                         const Tensor& grad_scales);
// `buffer` holds the gradient of y and receives y. `scales`, and `sums` for the gradients of the
// scales, are columns in the accumulate dtype. All are matrices.
void scaled_value_and_backward_cpu(const ScaledActivation& activation, const Tensor& buffer,
                                   const Tensor& input, const Tensor& scales,
                                   const Tensor& grad_input, const Tensor& sums);
void scaled_backward_cuda(const ScaledActivation& activation, const Tensor& grad_output,
                          const Tensor& input, const Tensor& scales, Tensor grad_input,
                          const Tensor& grad_scales);

}  // namespace transformer_ops
