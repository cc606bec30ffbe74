// forward:  x ─► Bias ─► [Dropout] ─► AddExtraInput ─► y      one pass
//                           └───► mask      ▲ residual
#include <ATen/ops/dropout.h>

#include "bodies/add_extra_input.h"
#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "bodies/dropout.h"
#include "fuser/registry.h"
#include "kernels/dropout.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const Tensor& input = args.tensor(0);
  const Tensor& bias = args.tensor(1);
  check_compute_dtype(args, "input", input);
  check_compute_dtype(args, "bias", bias);
  TORCH_CHECK(bias.dim() == 1, "[", args.op(), "] bias must have 1 dimension, got shape ",
              bias.sym_sizes());
  check_trailing(args, "input", input, bias);
  TensorSpec sum = like(input);
  if (args.tensor(2).scalar_type() == accumulate_dtype(sum.dtype)) {
    sum.dtype = accumulate_dtype(sum.dtype);
  }
  check_extra_input(args, args.tensor(2), sum);
  check_probability(args, args.number(3));
  return {sum, args.flag(4) ? bit_mask(input) : TensorSpec{{0}, at::kByte}};
}

void forward_cpu(const Args& args, Tensors& results) {
  const cpu::Rows x{args.tensor(0), 1}, extra{args.tensor(2), 1}, y{results[0], 1};
  const Tensor bias = cpu::to_accumulate(args.tensor(1), x.tensor);
  const double p = args.number(3);
  const uint64_t seed = draw_seed(p);
  uint8_t* mask = args.flag(4) ? results[1].mutable_data_ptr<uint8_t>() : nullptr;
  cpu::parallel(x.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::bias_dropout_add(cpu::kernel_dtype(x.tensor), cpu::kernel_dtype(y.tensor), x.read(begin),
                          bias.const_data_ptr(), extra.read(begin), y.write(begin),
                          mask == nullptr ? nullptr : mask + begin / 8, seed, p, begin, end - begin,
                          bias.numel());
  });
}

void forward_cuda(const Args& args, Tensors& results) {
  const Tensor &x = args.tensor(0), &bias = args.tensor(1);
  const double p = args.number(3);
  uint8_t* mask = args.flag(4) ? results[1].mutable_data_ptr<uint8_t>() : nullptr;
  cuda::bias_dropout_add(cuda::stream_of(x), kernel_dtype(x), kernel_dtype(results[0]),
                         cuda::read(x), cuda::vector(bias), cuda::read(args.tensor(2)),
                         cuda::write(results[0]), mask, draw_philox(x.device(), p), p,
                         cuda::rows_of(x), x.size(-1));
}

Tensors forward_unfused(const Args& args) {
  const Tensor x = to_accumulate(args.tensor(0));
  const Tensor sum = x + args.tensor(1).to(x.scalar_type());
  const Tensor y = at::dropout(sum, args.number(3), /*train=*/true) + args.tensor(2);
  return {y.to(args.tensor(2).scalar_type())};
}

// A float32 residual stays float32, as under autocast. A product takes none such, so that the pass
// is worth it after one even where nothing is dropped.
std::optional<std::string> why_not(const Match& match) {
  if (auto reason = different_summands(match, 2, /*or_float32=*/true)) return reason;
  if (!match.is_idle(1) || different_summands(match, 2)) return std::nullopt;
  return "the dropout is off";
}

Bindings bind(const Match& match) {
  Bindings bindings = {{"mask", Field{1, "mask"}}};
  if (match.is_idle(1)) bindings["p"] = Attribute(0.0);
  return bindings;
}

std::optional<std::string> why_not_without(const Match& match) {
  return different_summands(match, 1, /*or_float32=*/true);
}

Bindings bind_without(const Match&) {
  return {{"p", Attribute(0.0)}, {"save_mask", Attribute(false)}};
}

TypedOp typed_op() {
  return {.schema =
              "bias_dropout_add(Tensor input, Tensor bias, Tensor extra_input, float p, "
              "bool save_mask) -> (Tensor output, Tensor mask)",
          .shape = shape,
          .overwrites = {0, 2},
          .cpu = forward_cpu,
          .cuda = forward_cuda,
          .unfused = forward_unfused,
          .random = true};
}

// Who calls the typed op itself gets the gradients of the mask it drew.
bool register_forward() {
  add_rule({.name = "bias_dropout_add",
            .pass = Pass::Forward,
            .benefit = 50,
            .pattern = {{"Bias"}, {"Dropout"}, {"AddExtraInput"}},
            .why_not = why_not,
            .forward = typed_op().schema,
            .bind = bind});
  // Without a dropout, where no product takes the bias.
  add_rule({.name = "bias_add",
            .pass = Pass::Forward,
            .benefit = 15,
            .pattern = {{"Bias"}, {"AddExtraInput"}},
            .why_not = why_not_without,
            .forward = typed_op().schema,
            .bind = bind_without});
  register_typed_op(typed_op());
  add_typed_op_pair({"bias_dropout_add", "dropout_bias_backward"});
  return true;
}

[[maybe_unused]] const bool registered = register_forward();

}  // namespace
}  // namespace transformer_ops
