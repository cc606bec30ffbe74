// The elementwise activations as table rows, for the basic ops and the fused ops that contain one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/cpu.h"
#include "op/typed_op.h"

namespace transformer_ops {

struct ActivationRow {
  std::string kind;  // the kind of the op
  std::string name;  // the name of the typed op, and an attribute of fused ops
  std::string formula;
  cpu::Activation activation;
  Tensor (*decomposition)(const Tensor& input);
  // Saves one bit for each element instead of the input.
  bool keeps_mask = false;
};

const std::vector<ActivationRow>& activations();
// Raises if there is no row of that name.
const ActivationRow& activation_of(const Checks& check, std::string_view name);
const ActivationRow& activation_of_kind(std::string_view kind);
std::vector<std::string> activation_kinds();

// The gradient from the saved input or bit mask.
Tensor activation_gradient_decomposed(const ActivationRow& row, const Tensor& grad_output,
                                      const Tensor& saved);
// Unpacks a bit mask to a tensor of ones and zeros like `like`.
Tensor unpack_mask(const Tensor& mask, const Tensor& like);

// An undefined mask is not written.
void activation_forward_cpu(const ActivationRow& row, const Tensor& input, const Tensor& output,
                            const Tensor& mask);
void activation_forward_cuda(const ActivationRow& row, const Tensor& input, const Tensor& output,
                             const Tensor& mask);

}  // namespace transformer_ops
