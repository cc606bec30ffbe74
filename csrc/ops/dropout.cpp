// Dropout: zeroes elements with probability p and scales the rest by 1 / (1 - p). Keeps one bit an
// element. The bits are Philox counters; their key is one number of torch's generator.
#include <ATen/ops/dropout.h>
#include <ATen/ops/where.h>

#include "bodies/activation.h"
#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "bodies/dropout.h"
#include "kernels/dropout.h"
#include "op/op.h"
#include "op/recompute.h"

namespace transformer_ops {
namespace {

TensorSpecs forward_shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(0));
  check_probability(args, args.number(1));
  const TensorSpec none{{0}, at::kByte};
  return {like(args.tensor(0)), args.flag(2) ? bit_mask(args.tensor(0)) : none};
}

void forward_cpu(const Args& args, Tensors& results) {
  const double p = args.number(1);
  const cpu::Rows x{args.tensor(0), 1}, y{results[0], 1};
  const uint64_t seed = draw_seed(p);
  uint8_t* mask = args.flag(2) ? results[1].mutable_data_ptr<uint8_t>() : nullptr;
  cpu::parallel(x.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::dropout_forward(cpu::kernel_dtype(x.tensor), x.read(begin), y.write(begin),
                         mask == nullptr ? nullptr : mask + begin / 8, seed, p, begin, end - begin);
  });
}

void forward_cuda(const Args& args, Tensors& results) {
  const Tensor& x = args.tensor(0);
  const double p = args.number(1);
  cuda::dropout_forward(cuda::stream_of(x), kernel_dtype(x), cuda::read(x), cuda::write(results[0]),
                        args.flag(2) ? results[1].mutable_data_ptr<uint8_t>() : nullptr,
                        draw_philox(x.device(), p), p, x.numel());
}

Tensors forward_unfused(const Args& args) {
  return {at::dropout(args.tensor(0), args.number(1), /*train=*/true)};
}

TensorSpecs backward_shape(const Args& args) {
  const Tensor& grad = args.tensor(0);
  check_compute_dtype(args, "grad_output", grad);
  check_spec(args, "mask", args.tensor(1), bit_mask(grad));
  check_probability(args, args.number(2));
  return {like(grad)};
}

void backward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows grad{args.tensor(0), 1}, grad_x{results[0], 1};
  const auto* mask = args.tensor(1).const_data_ptr<uint8_t>();
  cpu::parallel(grad.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::dropout_backward(cpu::kernel_dtype(grad.tensor), grad.read(begin), mask + begin / 8,
                          grad_x.write(begin), args.number(2), end - begin);
  });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor& grad = args.tensor(0);
  cuda::dropout_backward(cuda::stream_of(grad), kernel_dtype(grad), cuda::read(grad),
                         args.tensor(1).const_data_ptr<uint8_t>(), cuda::write(results[0]),
                         args.number(2), grad.numel());
}

// Zero where dropped, whatever the value.
Tensor apply_mask(const Tensor& tensor, const Tensor& mask, double p) {
  const Tensor kept = unpack_mask(mask, tensor) != 0;
  return at::where(kept, tensor * (p < 1 ? 1 / (1 - p) : 0.0), 0);
}

Tensors backward_unfused(const Args& args) {
  return {apply_mask(args.tensor(0), args.tensor(1), args.number(2))};
}

// Dropping again is what backward does to a gradient.
TypedOp make_recompute() {
  return recompute_by({.schema = "dropout(Tensor input, Tensor mask, float p) -> Tensor output",
                       .shape = backward_shape,
                       .overwrites = {0},
                       .cpu = backward_cpu,
                       .cuda = backward_cuda,
                       .unfused = backward_unfused});
}

// Without a mask dropout was off, or no gradient passes it.
Tensor replay(const ReplayCall& call) {
  const Tensor mask = call.slot("mask");
  if (!mask.defined()) return call.input;
  return apply_mask(call.input, mask, std::get<double>(call.attributes.at("p")));
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "Dropout",
                    .summary = "x / (1 - p) where a random bit is set, else 0",
                    .attributes = {"p"},
                    .slots = {{"mask"}},
                    .inactive =
                        [](const Attributes& attributes, bool training) {
                          return !training || std::get<double>(attributes.at("p")) == 0;
                        }},
    .forward = {.schema = "dropout(Tensor input, float p, bool save_mask) -> "
                          "(Tensor output, Tensor mask)",
                .shape = forward_shape,
                .overwrites = {0},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused,
                .random = true},
    .backward = {.schema = "dropout_backward(Tensor grad_output, Tensor mask, float p) -> "
                           "Tensor grad_input",
                 .shape = backward_shape,
                 .overwrites = {0},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused},
    .recompute = make_recompute(),
    .replay = replay,
});

}  // namespace
}  // namespace transformer_ops
