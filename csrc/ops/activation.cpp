// Elementwise activations: GELU, QGELU, ReLU, SReLU, SiLU. ReLU keeps one bit an element.
#include <ATen/ops/sqrt.h>
#include <ATen/ops/where.h>

#include "bodies/activation.h"
#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "kernels/activation.h"
#include "op/op.h"
#include "op/recompute.h"

namespace transformer_ops {
namespace {

using cpu::Activation;

TensorSpecs forward_shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(0));
  return {like(args.tensor(0))};
}

TensorSpecs masked_forward_shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(0));
  const TensorSpec none{{0}, at::kByte};
  return {like(args.tensor(0)), args.flag(1) ? bit_mask(args.tensor(0)) : none};
}

TensorSpecs backward_shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(1));
  check_spec(args, "grad_output", args.tensor(0), like(args.tensor(1)));
  return {like(args.tensor(1))};
}

TensorSpecs masked_backward_shape(const Args& args) {
  check_compute_dtype(args, "grad_output", args.tensor(0));
  check_spec(args, "mask", args.tensor(1), bit_mask(args.tensor(0)));
  return {like(args.tensor(0))};
}

void backward_cpu(const ActivationRow& row, const Args& args, Tensors& results) {
  const cpu::Rows grad{args.tensor(0), 1}, x{args.tensor(1), 1}, grad_x{results[0], 1};
  cpu::parallel(grad.count(), 1, 1, [&](int64_t begin, int64_t end) {
    cpu::activation_backward(row.activation, cpu::kernel_dtype(x.tensor), grad.read(begin),
                             x.read(begin), grad_x.write(begin), end - begin);
  });
}

void backward_cuda(const ActivationRow& row, const Args& args, Tensors& results) {
  const Tensor &grad = args.tensor(0), &x = args.tensor(1);
  cuda::activation_backward(cuda::stream_of(x), row.activation, kernel_dtype(x), cuda::read(grad),
                            cuda::read(x), cuda::write(results[0]), x.numel());
}

void masked_backward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows grad{args.tensor(0), 1}, grad_x{results[0], 1};
  const auto* mask = args.tensor(1).const_data_ptr<uint8_t>();
  cpu::parallel(grad.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::relu_backward(cpu::kernel_dtype(grad.tensor), grad.read(begin), mask + begin / 8,
                       grad_x.write(begin), end - begin);
  });
}

void masked_backward_cuda(const Args& args, Tensors& results) {
  const Tensor& grad = args.tensor(0);
  cuda::relu_backward(cuda::stream_of(grad), kernel_dtype(grad), cuda::read(grad),
                      args.tensor(1).const_data_ptr<uint8_t>(), cuda::write(results[0]),
                      grad.numel());
}

// From the mask, or from the output that a joint fusion keeps.
Tensor replay_relu(const ReplayCall& call) {
  if (const Tensor mask = call.slot("mask"); mask.defined()) {
    return call.input * unpack_mask(mask, call.input);
  }
  if (!call.output.defined()) return {};
  return call.input * (call.output > 0).to(call.input.scalar_type());
}

Tensor replay_srelu(const ReplayCall& call) {
  if (!call.output.defined()) return {};
  // d relu(x)^2 = 2 relu(x) dx, and relu(x) = sqrt(y): the input is known where it matters.
  const Tensor known = at::where(call.output > 0, at::sqrt(call.output), -1);
  return activation_of_kind("SReLU").unfused(call.input + (known - call.input).detach());
}

// The result that takes the mask, or undefined.
Tensor wanted_mask(const ActivationRow& row, const Args& args, const Tensors& results) {
  return row.keeps_mask && args.flag(1) ? results[1] : Tensor();
}

TypedOp make_forward(const ActivationRow& row) {
  const std::string name = row.name;
  const bool keeps_mask = row.keeps_mask;
  return {.schema = keeps_mask ? name +
                                     "(Tensor input, bool save_mask) -> (Tensor output, "
                                     "Tensor mask)"
                               : name + "(Tensor input) -> Tensor output",
          .shape = keeps_mask ? masked_forward_shape : forward_shape,
          .overwrites = {0},
          .cpu =
              [&row](const Args& args, Tensors& results) {
                activation_forward_cpu(row, args.tensor(0), results[0],
                                       wanted_mask(row, args, results));
              },
          .cuda =
              [&row](const Args& args, Tensors& results) {
                activation_forward_cuda(row, args.tensor(0), results[0],
                                        wanted_mask(row, args, results));
              },
          .unfused = [&row](const Args& args) { return Tensors{row.unfused(args.tensor(0))}; }};
}

TypedOp make_backward(const ActivationRow& row) {
  const std::string saved = row.keeps_mask ? "mask" : "input";
  TypedOp op{.schema = row.name + "_backward(Tensor grad_output, Tensor " + saved +
                       ") -> Tensor grad_input",
             .overwrites = {0, 1}};
  if (row.keeps_mask) {
    op.shape = masked_backward_shape;
    op.cpu = masked_backward_cpu;
    op.cuda = masked_backward_cuda;
    op.unfused = [&row](const Args& args) {
      return Tensors{activation_gradient_unfused(row, args.tensor(0), args.tensor(1))};
    };
  } else {
    op.shape = backward_shape;
    op.cpu = [&row](const Args& args, Tensors& results) { backward_cpu(row, args, results); };
    op.cuda = [&row](const Args& args, Tensors& results) { backward_cuda(row, args, results); };
  }
  return op;
}

// Without the mask, which backward has.
TypedOp make_recompute(const ActivationRow& row) {
  return recompute_by(
      {.schema = row.name + "(Tensor input) -> Tensor output",
       .shape = forward_shape,
       .overwrites = {0},
       .cpu =
           [&row](const Args& args, Tensors& results) {
             activation_forward_cpu(row, args.tensor(0), results[0], {});
           },
       .cuda =
           [&row](const Args& args, Tensors& results) {
             activation_forward_cuda(row, args.tensor(0), results[0], {});
           },
       .unfused = [&row](const Args& args) { return Tensors{row.unfused(args.tensor(0))}; }});
}

bool register_activations() {
  for (const ActivationRow& row : activations()) {
    Op op{.declaration = {.kind = row.kind,
                          .summary = row.formula,
                          .slots = {{row.keeps_mask ? "mask" : "input"}},
                          .dtype = DTypeRule::Autocast},
          .forward = make_forward(row),
          .backward = make_backward(row),
          .recompute = make_recompute(row)};
    if (row.activation == Activation::ReLU) op.replay = replay_relu;
    if (row.activation == Activation::SReLU) op.replay = replay_srelu;
    register_op(std::move(op));
  }
  return true;
}

[[maybe_unused]] const bool registered = register_activations();

}  // namespace
}  // namespace transformer_ops
