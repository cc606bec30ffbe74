// forward:  x ─► AddExtraInput ─┬─► [MakeExtraOutput] ─► LayerNorm or RMSNorm ─► y
//                  ▲ residual   └─► sum: the new residual, and what the norm keeps
//
// Sum and norm in one pass over the rows, as between the blocks of a pre-norm transformer.
#include "bodies/add_extra_input.h"
#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "kernels/norm.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

// (output, sum, statistics...) for arguments (input, extra_input, weight, ...).
TensorSpecs shape(const Args& args, bool save_sum, int statistics) {
  const Tensor& input = args.tensor(0);
  const Tensor& weight = args.tensor(2);
  check_compute_dtype(args, "input", input);
  check_extra_input(args, args.tensor(1), like(input));
  check_compute_dtype(args, "weight", weight);
  check_trailing(args, "input", input, weight);
  TensorSpecs specs = {like(input), save_sum ? like(input) : TensorSpec{{0}, input.scalar_type()}};
  specs.resize(2 + statistics, row_statistics(input, weight.dim()));
  return specs;
}

// The norm's own meaning, of the sum; both take the arguments from weight on in the same order.
Tensors unfused(const char* norm, const Args& args) {
  std::vector<c10::IValue> values = {args.tensor(0) + args.tensor(1)};
  values.insert(values.end(), args.values().begin() + 2, args.values().end() - 1);
  return {find_typed_op(norm)->unfused(Args(args.op(), values))[0]};
}

// ---- LayerNorm

constexpr const char* kLayerNorm =
    "add_layer_norm(Tensor input, Tensor extra_input, Tensor weight, Tensor bias, float eps, "
    "bool zero_centered_gamma, bool save_sum) -> (Tensor output, Tensor sum, Tensor mean, "
    "Tensor rstd)";

TensorSpecs layer_norm_shape(const Args& args) {
  check_compute_dtype(args, "bias", args.tensor(3));
  check_same_sizes(args, "bias", args.tensor(3), args.tensor(2));
  return shape(args, args.flag(6), 2);
}

void layer_norm_cpu(const Args& args, Tensors& results) {
  const cpu::Rows x{args.tensor(0), args.tensor(2).numel()}, extra{args.tensor(1), x.width};
  const cpu::Rows y{results[0], x.width}, sum{results[1], x.width};
  const cpu::Rows mean{results[2], 1}, rstd{results[3], 1};
  const Tensor gamma = cpu::to_accumulate(args.tensor(2), x.tensor, args.flag(5) ? 1.0 : 0.0);
  const Tensor beta = cpu::to_accumulate(args.tensor(3), x.tensor);
  // Rows without elements have statistics too.
  cpu::parallel(rstd.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::add_layer_norm_forward(cpu::kernel_dtype(x.tensor), x.read(begin), extra.read(begin),
                                gamma.const_data_ptr(), beta.const_data_ptr(), args.number(4),
                                args.flag(6) ? sum.write(begin) : nullptr, y.write(begin),
                                mean.write(begin), rstd.write(begin), end - begin, x.width);
  });
}

void layer_norm_cuda(const Args& args, Tensors& results) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(2);
  cuda::norm_forward(cuda::stream_of(x), {.norm = cuda::Norm::LayerNorm,
                                          .dtype = kernel_dtype(x),
                                          .x = cuda::read(x),
                                          .extra = cuda::read(args.tensor(1)),
                                          .gamma = cuda::vector(weight, args.flag(5) ? 1.0 : 0.0),
                                          .beta = cuda::vector(args.tensor(3)),
                                          .eps = args.number(4),
                                          .sum = args.flag(6) ? cuda::write(results[1]) : nullptr,
                                          .y = cuda::write(results[0]),
                                          .mean = cuda::write(results[2]),
                                          .rstd = cuda::write(results[3]),
                                          .rows = results[3].numel(),
                                          .h = weight.numel()});
}

// ---- RMSNorm

constexpr const char* kRMSNorm =
    "add_rms_norm(Tensor input, Tensor extra_input, Tensor weight, float eps, "
    "bool zero_centered_gamma, bool save_sum) -> (Tensor output, Tensor sum, Tensor rstd)";

TensorSpecs rms_norm_shape(const Args& args) { return shape(args, args.flag(5), 1); }

void rms_norm_cpu(const Args& args, Tensors& results) {
  const cpu::Rows x{args.tensor(0), args.tensor(2).numel()}, extra{args.tensor(1), x.width};
  const cpu::Rows y{results[0], x.width}, sum{results[1], x.width}, rstd{results[2], 1};
  const Tensor gamma = cpu::to_accumulate(args.tensor(2), x.tensor, args.flag(4) ? 1.0 : 0.0);
  // Rows without elements have statistics too.
  cpu::parallel(rstd.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::add_rms_norm_forward(cpu::kernel_dtype(x.tensor), x.read(begin), extra.read(begin),
                              gamma.const_data_ptr(), args.number(3),
                              args.flag(5) ? sum.write(begin) : nullptr, y.write(begin),
                              rstd.write(begin), end - begin, x.width);
  });
}

void rms_norm_cuda(const Args& args, Tensors& results) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(2);
  cuda::norm_forward(cuda::stream_of(x), {.norm = cuda::Norm::RMSNorm,
                                          .dtype = kernel_dtype(x),
                                          .x = cuda::read(x),
                                          .extra = cuda::read(args.tensor(1)),
                                          .gamma = cuda::vector(weight, args.flag(4) ? 1.0 : 0.0),
                                          .eps = args.number(3),
                                          .sum = args.flag(5) ? cuda::write(results[1]) : nullptr,
                                          .y = cuda::write(results[0]),
                                          .rstd = cuda::write(results[2]),
                                          .rows = results[2].numel(),
                                          .h = weight.numel()});
}

// ---- rules

std::optional<std::string> why_not(const Match& match) {
  if (auto reason = different_summands(match, 0)) return reason;
  const int op = match.places[2];
  const DType sum = match.analysis.dtypes()[op];
  const DType computes = match.analysis.compute_dtype(op);
  if (computes == sum) return std::nullopt;
  return "the sum is " + to_text(sum) + ", and autocast has the norm compute in " +
         to_text(computes);
}

Bindings bind(const Match& match) {
  Bindings bindings = {
      {"sum", Field{2, "input"}}, {"mean", Field{2, "mean"}}, {"rstd", Field{2, "rstd"}}};
  if (match.has(1)) {
    bindings["sum"] = Field{1, "extra_output"};
    bindings["save_sum"] = Attribute(true);
  }
  return bindings;
}

bool register_norm(const std::string& name, const std::string& kind, TypedOp op) {
  return register_fused_op(
      {.rule = {.name = name,
                .pass = Pass::Forward,
                .benefit = 40,
                .pattern = {{"AddExtraInput"}, optional_op({"MakeExtraOutput"}), {kind}},
                .why_not = why_not,
                .bind = bind},
       .forward = std::move(op)});
}

[[maybe_unused]] const bool registered =
    register_norm("add_layer_norm", "LayerNorm",
                  {.schema = kLayerNorm,
                   .shape = layer_norm_shape,
                   .overwrites = {0, 1},
                   .cpu = layer_norm_cpu,
                   .cuda = layer_norm_cuda,
                   .unfused = [](const Args& args) { return unfused("layer_norm", args); }}) &&
    register_norm("add_rms_norm", "RMSNorm",
                  {.schema = kRMSNorm,
                   .shape = rms_norm_shape,
                   .overwrites = {0, 1},
                   .cpu = rms_norm_cpu,
                   .cuda = rms_norm_cuda,
                   .unfused = [](const Args& args) { return unfused("rms_norm", args); }});

}  // namespace
}  // namespace transformer_ops
