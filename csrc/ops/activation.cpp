// Elementwise activations: GELU, QGELU, ReLU, SReLU, SiLU. ReLU keeps one bit an element.
#include "ops/activation.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "ops/cpu.h"
#include "ops/cuda.h"
#include "ops/op.h"
#include "ops/recompute.h"

namespace transformer_ops {
namespace {

using cpu::Activation;

Tensor gelu(const Tensor& x) { return at::gelu(x, "tanh"); }
Tensor qgelu(const Tensor& input) {
  const Tensor x = to_accumulate(input);
  return (x * at::sigmoid(1.702 * x)).to(input.scalar_type());
}
Tensor relu(const Tensor& x) { return at::relu(x); }
Tensor srelu(const Tensor& x) { return at::relu(x).square(); }
Tensor silu(const Tensor& x) { return at::silu(x); }

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
    cpu::kernels().activation_backward(row.activation, cpu::kernel_dtype(x.tensor),
                                       grad.read(begin), x.read(begin), grad_x.write(begin),
                                       end - begin);
  });
}

void backward_cuda(const ActivationRow& row, const Args& args, Tensors& results) {
  const Tensor &grad = args.tensor(0), &x = args.tensor(1);
  cuda::kernels().activation_backward(cuda::stream_of(x), row.activation, kernel_dtype(x),
                                      cuda::read(grad), cuda::read(x), cuda::write(results[0]),
                                      x.numel());
}

void masked_backward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows grad{args.tensor(0), 1}, grad_x{results[0], 1};
  const auto* mask = args.tensor(1).const_data_ptr<uint8_t>();
  cpu::parallel(grad.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::kernels().relu_backward(cpu::kernel_dtype(grad.tensor), grad.read(begin), mask + begin / 8,
                                 grad_x.write(begin), end - begin);
  });
}

void masked_backward_cuda(const Args& args, Tensors& results) {
  const Tensor& grad = args.tensor(0);
  cuda::kernels().relu_backward(cuda::stream_of(grad), kernel_dtype(grad), cuda::read(grad),
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
  return srelu(call.input + (known - call.input).detach());
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

const std::vector<ActivationRow>& activations() {
  static const std::vector<ActivationRow> rows = {
      {"GELU", "gelu", "0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))", Activation::GELU, gelu},
      {"QGELU", "qgelu", "x sigmoid(1.702 x)", Activation::QGELU, qgelu},
      {"ReLU", "relu", "max(x, 0)", Activation::ReLU, relu, /*keeps_mask=*/true},
      {"SReLU", "srelu", "max(x, 0)^2", Activation::SReLU, srelu},
      {"SiLU", "silu", "x sigmoid(x)", Activation::SiLU, silu},
  };
  return rows;
}

const ActivationRow& activation_of(const Args& args, size_t i) {
  const auto name = args.text(i);
  const auto row = std::ranges::find(activations(), name, &ActivationRow::name);
  TORCH_CHECK(row != activations().end(), "[", args.op(), "] activation must be one of ",
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

Tensor activation_gradient_unfused(const ActivationRow& row, const Tensor& grad_output,
                                   const Tensor& saved) {
  if (row.keeps_mask) return grad_output * unpack_mask(saved, grad_output);
  const auto unfused = [&row](const Args& args) { return Tensors{row.unfused(args.tensor(0))}; };
  return differentiate(unfused, row.name.c_str(), {saved}, grad_output)[0];
}

void activation_forward_cpu(const ActivationRow& row, const Tensor& input, const Tensor& output,
                            const Tensor& mask) {
  const cpu::Rows x{input, 1}, y{output, 1};
  const auto dtype = cpu::kernel_dtype(input);
  if (!mask.defined()) {
    cpu::parallel(x.count(), 1, 1, [&](int64_t begin, int64_t end) {
      cpu::kernels().activation_forward(row.activation, dtype, x.read(begin), y.write(begin),
                                        end - begin);
    });
    return;
  }
  auto* bits = mask.mutable_data_ptr<uint8_t>();
  cpu::parallel(x.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::kernels().relu_forward(dtype, x.read(begin), y.write(begin), bits + begin / 8,
                                end - begin);
  });
}

void activation_forward_cuda(const ActivationRow& row, const Tensor& input, const Tensor& output,
                             const Tensor& mask) {
  const auto stream = cuda::stream_of(input);
  const auto dtype = kernel_dtype(input);
  if (mask.defined()) {
    cuda::kernels().relu_forward(stream, dtype, cuda::read(input), cuda::write(output),
                                 mask.mutable_data_ptr<uint8_t>(), input.numel());
  } else {
    cuda::kernels().activation_forward(stream, row.activation, dtype, cuda::read(input),
                                       cuda::write(output), input.numel());
  }
}

}  // namespace transformer_ops
