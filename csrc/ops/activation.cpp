// The elementwise activations: GELU in two forms, QGELU, ReLU, SReLU, SiLU. ReLU saves bits.
#include <ATen/ops/sqrt.h>
#include <ATen/ops/where.h>

#include "kernels/activation.h"
#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/activation.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"

namespace transformer_ops::ops::activation {
namespace {

using cpu::Activation;

TensorSpecs masked_forward_shape(const Checks& check, const Tensor& input, bool save_mask) {
  check.compute_dtype("input", input);
  return {like(input), save_mask ? bit_mask(input) : absent(at::kByte)};
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& input) {
  check.compute_dtype("input", input);
  check.spec("grad_output", grad_output, like(input));
  return {like(input)};
}

TensorSpecs masked_backward_shape(const Checks& check, const Tensor& grad_output,
                                  const Tensor& mask) {
  check.compute_dtype("grad_output", grad_output);
  check.spec("mask", mask, bit_mask(grad_output));
  return {like(grad_output)};
}

void backward_cpu(const ActivationRow& row, const Tensor& grad_output, const Tensor& input,
                  const Tensor& grad_input) {
  const cpu::Rows grad{grad_output, 1}, x{input, 1}, grad_x{grad_input, 1};
  cpu::parallel(grad.count(), 1, 1, [&](int64_t begin, int64_t end) {
    cpu::activation_backward(row.activation, cpu::kernel_dtype(input), grad.read(begin),
                             x.read(begin), grad_x.write(begin), end - begin);
  });
}

void backward_cuda(const ActivationRow& row, const Tensor& grad_output, const Tensor& input,
                   const Tensor& grad_input) {
  cuda::activation_backward(cuda::stream_of(input), row.activation, kernel_dtype(input),
                            cuda::read(grad_output), cuda::read(input), cuda::write(grad_input),
                            input.numel());
}

void masked_backward_cpu(const Tensor& grad_output, const Tensor& mask, Tensor& grad_input) {
  const cpu::Rows grad{grad_output, 1}, grad_x{grad_input, 1};
  const auto* const bits = mask.const_data_ptr<uint8_t>();
  cpu::parallel(grad.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::relu_backward(cpu::kernel_dtype(grad_output), grad.read(begin), bits + begin / 8,
                       grad_x.write(begin), end - begin);
  });
}

void masked_backward_cuda(const Tensor& grad_output, const Tensor& mask, Tensor& grad_input) {
  cuda::relu_backward(cuda::stream_of(grad_output), kernel_dtype(grad_output),
                      cuda::read(grad_output), mask.const_data_ptr<uint8_t>(),
                      cuda::write(grad_input), grad_output.numel());
}

// Computed from the mask, or from the output that a joint fusion saved.
Tensor replay_relu(const ReplayCall& call) {
  if (const Tensor mask = call.slot("mask"); mask.defined()) {
    return call.input * unpack_mask(mask, call.input);
  }
  if (!call.output.defined()) return {};
  return call.input * (call.output > 0).to(call.input.scalar_type());
}

Tensor replay_srelu(const ReplayCall& call) {
  if (!call.output.defined()) return {};
  // d relu(x)^2 = 2 relu(x) dx, and relu(x) = sqrt(y): the input is known where the gradient needs
  // it.
  const Tensor known = at::where(call.output > 0, at::sqrt(call.output), -1);
  return activation_of_kind("SReLU").decomposition(call.input + (known - call.input).detach());
}

TypedOp make_forward(const ActivationRow& row) {
  const auto cpu = [&row](const Tensor& input, Tensor& output) {
    activation_forward_cpu(row, input, output, {});
  };
  const auto cuda = [&row](const Tensor& input, Tensor& output) {
    activation_forward_cuda(row, input, output, {});
  };
  return {.schema = row.name + "(Tensor input) -> Tensor output",
          .overwrites = {"input"},
          .bodies = {cpu, cuda, row.decomposition},
          .by_rows = {"input"}};
}

TypedOp make_masked_forward(const ActivationRow& row) {
  const auto cpu = [&row](const Tensor& input, bool save_mask, Tensor& output, Tensor& mask) {
    activation_forward_cpu(row, input, output, save_mask ? mask : Tensor());
  };
  const auto cuda = [&row](const Tensor& input, bool save_mask, Tensor& output, Tensor& mask) {
    activation_forward_cuda(row, input, output, save_mask ? mask : Tensor());
  };
  const auto decomposition = [&row](const Tensor& input, bool) { return row.decomposition(input); };
  return {.schema = row.name + "(Tensor input, bool save_mask) -> (Tensor output, Tensor mask)",
          .shape = masked_forward_shape,
          .overwrites = {"input"},
          .bodies = {cpu, cuda, decomposition},
          .by_rows = {"input"}};
}

TypedOp make_backward(const ActivationRow& row) {
  const auto cpu = [&row](const Tensor& grad_output, const Tensor& input, Tensor& grad_input) {
    backward_cpu(row, grad_output, input, grad_input);
  };
  const auto cuda = [&row](const Tensor& grad_output, const Tensor& input, Tensor& grad_input) {
    backward_cuda(row, grad_output, input, grad_input);
  };
  return {.schema = row.name + "_backward(Tensor grad_output, Tensor input) -> Tensor grad_input",
          .shape = backward_shape,
          .overwrites = {"grad_output", "input"},
          .bodies = {.cpu = cpu, .cuda = cuda},
          .by_rows = {"grad_output", "input"}};
}

TypedOp make_masked_backward(const ActivationRow& row) {
  const auto decomposition = [&row](const Tensor& grad_output, const Tensor& mask) {
    return activation_gradient_decomposed(row, grad_output, mask);
  };
  return {.schema = row.name + "_backward(Tensor grad_output, Tensor mask) -> Tensor grad_input",
          .shape = masked_backward_shape,
          .overwrites = {"grad_output", "mask"},
          .bodies = {masked_backward_cpu, masked_backward_cuda, decomposition},
          .by_rows = {"grad_output", "mask"}};
}

bool register_activations() {
  for (const ActivationRow& row : activations()) {
    Op op{.declaration = {.kind = row.kind,
                          .summary = row.formula,
                          // It changes nothing if a mask is saved, which is smaller.
                          .flags = {kCacheQuantizedInput},
                          .slots = {{row.keeps_mask ? "mask" : "input"}},
                          .dtype = DTypeRule::Autocast},
          .forward = row.keeps_mask ? make_masked_forward(row) : make_forward(row),
          .backward = row.keeps_mask ? make_masked_backward(row) : make_backward(row),
          // The mask is available in backward.
          .recompute = recompute_by(make_forward(row))};
    if (row.activation == Activation::ReLU) op.replay = replay_relu;
    if (row.activation == Activation::SReLU) op.replay = replay_srelu;
    register_op(std::move(op));
  }
  return true;
}

[[maybe_unused]] const bool registered = register_activations();

}  // namespace
}  // namespace transformer_ops::ops::activation
