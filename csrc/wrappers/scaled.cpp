#include "wrappers/scaled.h"

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/glu.h"
#include "kernels/scaled.h"
#include "wrappers/activation.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"

namespace transformer_ops {
namespace {

const ActivationRow& srelu() { return activation_of_kind("SReLU"); }

// The row sums of elementwise products, in the accumulate dtype.
Tensor row_products(const Tensor& left, const Tensor& right) {
  return (to_accumulate(left) * to_accumulate(right)).sum(-1);
}

// `scale` and `sums` are in the accumulate dtype; undefined sums and values are not written.
void run_backward(const ScaledActivation& activation, const Tensor& grad_output,
                  const Tensor& input, const Tensor& scale, const Tensor& grad_input,
                  const Tensor& sums, const Tensor& values) {
  const int64_t width = grad_output.size(-1);
  const cpu::Rows x{input, input.size(-1)}, grad{grad_output, width}, grad_x{grad_input, x.width};
  const cpu::Rows s{scale, 1}, sum{sums, 1}, value{values, width};
  const auto dtype = cpu::kernel_dtype(input);
  cpu::parallel(scale.numel(), x.width, 1, [&](int64_t begin, int64_t end) {
    void* const to = sums.defined() ? sum.write(begin) : nullptr;
    void* const again = values.defined() ? value.write(begin) : nullptr;
    if (activation.row.glu != nullptr) {
      cpu::scaled_glu_backward(activation.glu, dtype, grad.read(begin), x.read(begin),
                               s.read(begin), grad_x.write(begin), to, again, end - begin, width);
    } else {
      cpu::scaled_srelu_backward(dtype, grad.read(begin), x.read(begin), s.read(begin),
                                 grad_x.write(begin), to, again, end - begin, width);
    }
  });
}

}  // namespace

const std::vector<ScaledRow>& scaled_activations() {
  static const std::vector<ScaledRow> rows = {
      {"ScaledSwiGLU", "scaled_swiglu", &glu_of_kind("SwiGLU")},
      {"ScaledSiTUGLU", "scaled_situglu", &glu_of_kind("SiTUGLU")},
      {"ScaledClampedQGeGLU", "scaled_clamped_qgeglu", &glu_of_kind("ClampedSwiGLU")},
      {"ScaledSReLU", "scaled_srelu"},
  };
  return rows;
}

ScaledActivation scaled_of(const Checks& check, const GluArguments& arguments) {
  const auto row = std::ranges::find(scaled_activations(), arguments.glu, &ScaledRow::name);
  TORCH_CHECK(row != scaled_activations().end(), "[", check.op(), "] glu must be one of ",
              names_of(scaled_activations()), ", got '", arguments.glu, "'");
  if (row->glu == nullptr) return {*row};
  return {*row,
          {.kind = row->glu->glu,
           .interleave = arguments.glu_interleave_size,
           .beta1 = arguments.beta1,
           .beta2 = arguments.beta2,
           .limit = arguments.limit,
           .alpha = arguments.alpha,
           .offset = arguments.glu_linear_offset}};
}

Bindings bind_scaled(const Match& match, int k) {
  const auto row = std::ranges::find(scaled_activations(), match.kind(k), &ScaledRow::kind);
  Bindings bindings = default_glu_bindings();
  bindings["glu"] = Attribute(row->name);
  for (const auto& [name, value] : match.op(k).attributes) bindings[name] = value;
  return bindings;
}

std::vector<std::string> scaled_kinds() {
  std::vector<std::string> kinds;
  for (const ScaledRow& row : scaled_activations()) kinds.push_back(row.kind);
  return kinds;
}

TensorSpec scaled_output(const Checks& check, const ScaledActivation& activation,
                         const Tensor& input, const Tensor& scales) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  check_row_scales(check, scales, input);
  return activated_output(check, "input", like(input), activation);
}

TensorSpec activated_output(const Checks& check, const char* name, const TensorSpec& input,
                            const ScaledActivation& activation) {
  if (activation.row.glu == nullptr) return input;
  return glu_output(check, name, input, activation.glu);
}

void check_row_scales(const Checks& check, const Tensor& scales, const Tensor& input) {
  check.compute_dtype("scales", scales);
  const auto rows = input.sym_sizes().slice(0, input.dim() - 1);
  TORCH_CHECK(scales.sym_sizes().equals(rows), "[", check.op(),
              "] scales must have a number for each row, shape ", rows, ", got ",
              scales.sym_sizes());
}

Tensor scaled_decomposed(const ScaledActivation& activation, const Tensor& input,
                         const Tensor& scales) {
  const Tensor x = to_accumulate(input);
  const GluRow* const row = activation.row.glu;
  const Tensor y =
      row != nullptr ? glu_decomposed(*row, x, activation.glu) : srelu().decomposition(x);
  return (y * scales.to(x.scalar_type()).unsqueeze(-1)).to(input.scalar_type());
}

void scaled_forward_cpu(const ScaledActivation& activation, const Tensor& input,
                        const Tensor& scales, const Tensor& output) {
  scaled_rows_forward_cpu(activation, input, cpu::to_accumulate(scales, input), output);
}

void scaled_rows_forward_cpu(const ScaledActivation& activation, const Tensor& input,
                             const Tensor& scales, const Tensor& output) {
  const cpu::Rows x{input, input.size(-1)}, y{output, output.size(-1)}, s{scales, 1};
  const auto dtype = cpu::kernel_dtype(input);
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    if (activation.row.glu != nullptr) {
      cpu::scaled_glu_forward(activation.glu, dtype, x.read(begin), s.read(begin), y.write(begin),
                              end - begin, y.width);
    } else {
      cpu::scaled_srelu_forward(dtype, x.read(begin), s.read(begin), y.write(begin), end - begin,
                                y.width);
    }
  });
}

void scaled_forward_cuda(const ScaledActivation& activation, const Tensor& input,
                         const Tensor& scales, const Tensor& output) {
  const Tensor x = to_accumulate(input);
  const Tensor y = empty(output.sizes(), x.scalar_type(), x.device());
  if (activation.row.glu != nullptr) {
    glu_forward_cuda(activation.glu, x, y);
  } else {
    activation_forward_cuda(srelu(), x, y, {});
  }
  output.copy_(y * scales.to(x.scalar_type()).unsqueeze(-1));
}

void scaled_backward_cpu(const ScaledActivation& activation, const Tensor& grad_output,
                         const Tensor& input, const Tensor& scales, Tensor grad_input,
                         const Tensor& grad_scales) {
  if (!grad_input.defined()) grad_input = empty_cpu(input.sizes(), input.scalar_type());
  const Tensor scale = cpu::to_accumulate(scales, input);
  const bool in_place = grad_scales.defined() && grad_scales.scalar_type() == scale.scalar_type();
  Tensor sums = grad_scales;
  if (grad_scales.defined() && !in_place) sums = empty_cpu(scale.sizes(), scale.scalar_type());
  run_backward(activation, grad_output, input, scale, grad_input, sums, {});
  if (sums.defined() && !in_place) grad_scales.copy_(sums);
}

void scaled_value_and_backward_cpu(const ScaledActivation& activation, const Tensor& buffer,
                                   const Tensor& input, const Tensor& scales,
                                   const Tensor& grad_input, const Tensor& sums) {
  run_backward(activation, buffer, input, scales, grad_input, sums, buffer);
}

void scaled_backward_cuda(const ScaledActivation& activation, const Tensor& grad_output,
                          const Tensor& input, const Tensor& scales, Tensor grad_input,
                          const Tensor& grad_scales) {
  const Tensor x = to_accumulate(input);
  const bool is_gated = activation.row.glu != nullptr;
  if (grad_scales.defined()) {
    const Tensor y = empty(grad_output.sizes(), x.scalar_type(), x.device());
    is_gated ? glu_forward_cuda(activation.glu, x, y) : activation_forward_cuda(srelu(), x, y, {});
    grad_scales.copy_(row_products(grad_output, y));
  }
  if (!grad_input.defined()) return;
  const Tensor grad = to_accumulate(grad_output) * scales.to(x.scalar_type()).unsqueeze(-1);
  const Tensor grad_x = empty(x.sizes(), x.scalar_type(), x.device());
  if (is_gated) {
    glu_backward_cuda(activation.glu, grad, x, grad_x);
  } else {
    cuda::activation_backward(cuda::stream_of(x), cpu::Activation::SReLU, kernel_dtype(x),
                              cuda::read(grad), cuda::read(x), cuda::write(grad_x), x.numel());
  }
  grad_input.copy_(grad_x);
}

}  // namespace transformer_ops
