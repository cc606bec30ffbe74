// forward:  x ─► Bias ─► [Dropout] ─► AddExtraInput ─► y      one pass
//                           └───► mask      ▲ residual
#include <ATen/ops/dropout.h>

#include "fuser/registry.h"
#include "kernels/dropout.h"
#include "op/op.h"
#include "wrappers/add_extra_input.h"
#include "wrappers/bias.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/dropout.h"

namespace transformer_ops::fused::bias_dropout_add {
namespace {

TensorSpecs shape(const Checks& check, const Tensor& input, const Tensor& bias,
                  const Tensor& extra_input, double p, bool save_mask) {
  check.compute_dtype("input", input);
  check_bias(check, input, bias);
  TensorSpec sum = like(input);
  if (extra_input.scalar_type() == accumulate_dtype(sum.dtype)) {
    sum.dtype = accumulate_dtype(sum.dtype);
  }
  check_extra_input(check, extra_input, sum);
  check_probability(check, p);
  return {sum, save_mask ? bit_mask(input) : absent(at::kByte)};
}

void forward_cpu(const Tensor& input, const Tensor& bias, const Tensor& extra_input, double p,
                 bool save_mask, Tensor& output, Tensor& mask) {
  const cpu::Rows x{input, 1}, extra{extra_input, 1}, y{output, 1};
  const Tensor added = cpu::to_accumulate(bias, input);
  const uint64_t seed = draw_seed(p);
  uint8_t* const bits = save_mask ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  cpu::parallel(x.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::bias_dropout_add(cpu::kernel_dtype(input), cpu::kernel_dtype(output), x.read(begin),
                          added.const_data_ptr(), extra.read(begin), y.write(begin),
                          bits == nullptr ? nullptr : bits + begin / 8, seed, p, begin, end - begin,
                          added.numel());
  });
}

void forward_cuda(const Tensor& input, const Tensor& bias, const Tensor& extra_input, double p,
                  bool save_mask, Tensor& output, Tensor& mask) {
  uint8_t* const bits = save_mask ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  cuda::bias_dropout_add(cuda::stream_of(input), kernel_dtype(input), kernel_dtype(output),
                         cuda::read(input), cuda::vector(bias), cuda::read(extra_input),
                         cuda::write(output), bits, draw_philox(input.device(), p), p,
                         cuda::rows_of(input), input.size(-1));
}

Tensor forward_decomposed(const Tensor& input, const Tensor& bias, const Tensor& extra_input,
                          double p, bool) {
  const Tensor x = to_accumulate(input);
  const Tensor sum = x + bias.to(x.scalar_type());
  const Tensor y = at::dropout(sum, p, /*train=*/true) + extra_input;
  return y.to(extra_input.scalar_type());
}

// A float32 residual stays float32, as under autocast. The product cannot add such a residual, so
// the pass pays even if nothing is dropped.
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
          .overwrites = {"input", "extra_input"},
          .bodies = {forward_cpu, forward_cuda, forward_decomposed},
          .random = true};
}

// A caller of the typed op itself gets gradients that use the mask it drew.
bool register_forward() {
  add_rule({.name = "bias_dropout_add",
            .pass = Pass::Forward,
            .benefit = 50,
            .pattern = {{"Bias"}, {"Dropout"}, {"AddExtraInput"}},
            .why_not = why_not,
            .forward = typed_op().schema,
            .bind = bind});
  // This rule is for a bias without dropout that no product takes.
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
}  // namespace transformer_ops::fused::bias_dropout_add
