#include "wrappers/activation.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>

#include <algorithm>

#include "kernels/activation.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"

namespace transformer_ops {
namespace {

using cpu::Activation;

Tensor gelu(const Tensor& x) { return at::gelu(x, "tanh"); }
Tensor exact_gelu(const Tensor& x) { return at::gelu(x, "none"); }
Tensor qgelu(const Tensor& input) {
  const Tensor x = to_accumulate(input);
  return (x * at::sigmoid(1.702 * x)).to(input.scalar_type());
}
Tensor relu(const Tensor& x) { return at::relu(x); }
Tensor srelu(const Tensor& x) { return at::relu(x).square(); }
Tensor silu(const Tensor& x) { return at::silu(x); }

}  // namespace

const std::vector<ActivationRow>& activations() {
  static const std::vector<ActivationRow> rows = {
      {"GELU", "gelu", "0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))", Activation::GELU, gelu},
      {"ExactGELU", "exact_gelu", "0.5 x (1 + erf(x / sqrt(2)))", Activation::ExactGELU,
       exact_gelu},
      {"QGELU", "qgelu", "x sigmoid(1.702 x)", Activation::QGELU, qgelu},
      {"ReLU", "relu", "max(x, 0)", Activation::ReLU, relu, /*keeps_mask=*/true},
      {"SReLU", "srelu", "max(x, 0)^2", Activation::SReLU, srelu},
      {"SiLU", "silu", "x sigmoid(x)", Activation::SiLU, silu},
  };
  return rows;
}

const ActivationRow& activation_of(const Checks& check, std::string_view name) {
  const auto row = std::ranges::find(activations(), name, &ActivationRow::name);
  TORCH_CHECK(row != activations().end(), "[", check.op(), "] activation must be one of ",
              names_of(activations()), ", got '", name, "'");
  return *row;
}

const ActivationRow& activation_of_kind(std::string_view kind) {
  const auto row = std::ranges::find(activations(), kind, &ActivationRow::kind);
  TORCH_CHECK(row != activations().end(), "[activation] kind must be known, got '", kind, "'");
  return *row;
}

std::vector<std::string> activation_kinds() {
  std::vector<std::string> kinds;
  for (const ActivationRow& row : activations()) kinds.emplace_back(row.kind);
  return kinds;
}

Tensor unpack_mask(const Tensor& mask, const Tensor& like) {
  const Tensor bits = at::arange(8, mask.options());
  const Tensor flat = mask.unsqueeze(-1).bitwise_right_shift(bits).bitwise_and(1).flatten();
  return flat.narrow_symint(0, 0, like.sym_numel())
      .view_symint(like.sym_sizes())
      .to(like.scalar_type());
}

Tensor activation_gradient_decomposed(const ActivationRow& row, const Tensor& grad_output,
                                      const Tensor& saved) {
  if (row.keeps_mask) return grad_output * unpack_mask(saved, grad_output);
  return std::get<0>(gradients(row.decomposition, grad_output, saved));
}

void activation_forward_cpu(const ActivationRow& row, const Tensor& input, const Tensor& output,
                            const Tensor& mask) {
  const cpu::Rows x{input, 1}, y{output, 1};
  const auto dtype = cpu::kernel_dtype(input);
  if (!mask.defined()) {
    cpu::parallel(x.count(), 1, 1, [&](int64_t begin, int64_t end) {
      cpu::activation_forward(row.activation, dtype, x.read(begin), y.write(begin), end - begin);
    });
    return;
  }
  auto* bits = mask.mutable_data_ptr<uint8_t>();
  cpu::parallel(x.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::relu_forward(dtype, x.read(begin), y.write(begin), bits + begin / 8, end - begin);
  });
}

void activation_forward_cuda(const ActivationRow& row, const Tensor& input, const Tensor& output,
                             const Tensor& mask) {
  const auto stream = cuda::stream_of(input);
  const auto dtype = kernel_dtype(input);
  if (mask.defined()) {
    cuda::relu_forward(stream, dtype, cuda::read(input), cuda::write(output),
                       mask.mutable_data_ptr<uint8_t>(), input.numel());
  } else {
    cuda::activation_forward(stream, row.activation, dtype, cuda::read(input), cuda::write(output),
                             input.numel());
  }
}

}  // namespace transformer_ops
