// Bias: y = x + b over the last dimension.
#include <ATen/ops/add.h>

#include "bodies/bias.h"
#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "kernels/bias.h"
#include "op/op.h"
#include "op/recompute.h"

namespace transformer_ops {
namespace {

TensorSpecs forward_shape(const Args& args) {
  const Tensor& bias = args.tensor(1);
  check_compute_dtype(args, "input", args.tensor(0));
  check_compute_dtype(args, "bias", bias);
  TORCH_CHECK(bias.dim() == 1, "[", args.op(), "] bias must have 1 dimension, got shape ",
              bias.sym_sizes());
  check_trailing(args, "input", args.tensor(0), bias);
  return {like(args.tensor(0))};
}

void forward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows x{args.tensor(0), args.tensor(1).numel()}, y{results[0], x.width};
  const Tensor bias = cpu::to_accumulate(args.tensor(1), x.tensor);
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::bias_add(cpu::kernel_dtype(x.tensor), x.read(begin), bias.const_data_ptr(), y.write(begin),
                  end - begin, x.width);
  });
}

void forward_cuda(const Args& args, Tensors& results) {
  const Tensor& x = args.tensor(0);
  cuda::bias_add(cuda::stream_of(x), kernel_dtype(x), cuda::read(x), cuda::vector(args.tensor(1)),
                 cuda::write(results[0]), cuda::rows_of(x), x.size(-1));
}

Tensors forward_unfused(const Args& args) {
  const Tensor x = to_accumulate(args.tensor(0));
  return {(x + args.tensor(1).to(x.scalar_type())).to(args.tensor(0).scalar_type())};
}

TensorSpecs backward_shape(const Args& args) {
  check_compute_dtype(args, "grad_output", args.tensor(0));
  check_has_rows(args, "grad_output", args.tensor(0));
  return {bias_gradient(args.tensor(0))};
}

void backward_cpu(const Args& args, Tensors& results) {
  sum_columns_cpu(args.tensor(0), results[0]);
}

void backward_cuda(const Args& args, Tensors& results) {
  sum_columns_cuda(args.tensor(0), results[0]);
}

Tensors backward_unfused(const Args& args) {
  const Tensor& grad = args.tensor(0);
  return {grad.sum_to_size_symint({grad.sym_size(-1)})};
}

const TypedOp kForward = {.schema = "bias(Tensor input, Tensor bias) -> Tensor output",
                          .shape = forward_shape,
                          .overwrites = {0},
                          .cpu = forward_cpu,
                          .cuda = forward_cuda,
                          .unfused = forward_unfused};

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "Bias",
                    .summary = "x + b over the last dimension",
                    .parameters = {"bias"},
                    .attributes = {"size"}},
    .forward = kForward,
    .backward = {.schema = "bias_backward(Tensor grad_output) -> Tensor grad_bias",
                 .shape = backward_shape,
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused},
    .recompute = recompute_by(kForward),
});

}  // namespace
}  // namespace transformer_ops
