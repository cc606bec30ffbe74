// forward:  x ─► AddExtraInput ─┬─► [MakeExtraOutput] ─► LayerNorm or RMSNorm ─► y
//                  ▲ residual   └─► sum: the new residual, which the norm saves
//
// Sum and norm run in one pass over the rows, as between the blocks of a pre-norm transformer.
#include "op/op.h"
#include "wrappers/add_extra_input.h"
#include "wrappers/cpu.h"
#include "wrappers/norm.h"

namespace transformer_ops::fused::add_norm {
namespace {

// (output, sum, statistics...)
TensorSpecs outputs(const Checks& check, const Tensor& input, const Tensor& extra_input,
                    const NormShape& shape, bool save_sum, int statistics) {
  check_extra_input(check, extra_input, like(input));
  TensorSpecs specs = {like(input), save_sum ? like(input) : absent(input.scalar_type())};
  specs.resize(2 + statistics, row_statistics(input, std::ssize(shape)));
  return specs;
}

// ---- LayerNorm

constexpr const char* kLayerNorm =
    "add_layer_norm(Tensor input, Tensor extra_input, Tensor? weight, Tensor? bias, "
    "int[] normalized_shape, float eps, bool zero_centered_gamma, bool save_sum) -> "
    "(Tensor output, Tensor sum, Tensor mean, Tensor rstd)";

TensorSpecs layer_norm_shape(const Checks& check, const Tensor& input, const Tensor& extra_input,
                             const Tensor* weight, const Tensor* bias, const NormShape& shape,
                             double, bool zero_centered_gamma, bool save_sum) {
  check_norm(check, input, weight, bias, shape, zero_centered_gamma);
  return outputs(check, input, extra_input, shape, save_sum, 2);
}

void layer_norm_cpu(const Tensor& input, const Tensor& extra_input, const Tensor* weight,
                    const Tensor* bias, const NormShape& shape, double eps,
                    bool zero_centered_gamma, bool save_sum, Tensor& output, Tensor& sum,
                    Tensor& mean, Tensor& rstd) {
  const cpu::Rows x{input, norm_width(shape)}, extra{extra_input, x.width};
  const cpu::Rows y{output, x.width}, sums{sum, x.width}, means{mean, 1}, rstds{rstd, 1};
  const cpu::NormParameters parameters(input, weight, bias, zero_centered_gamma);
  // Rows without elements have statistics, too.
  cpu::parallel(rstds.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::add_layer_norm_forward(cpu::kernel_dtype(input), x.read(begin), extra.read(begin),
                                parameters.gamma, parameters.beta, eps,
                                save_sum ? sums.write(begin) : nullptr, y.write(begin),
                                means.write(begin), rstds.write(begin), end - begin, x.width);
  });
}

void layer_norm_cuda(const Tensor& input, const Tensor& extra_input, const Tensor* weight,
                     const Tensor* bias, const NormShape& shape, double eps,
                     bool zero_centered_gamma, bool save_sum, Tensor& output, Tensor& sum,
                     Tensor& mean, Tensor& rstd) {
  auto norm = cuda::norm_of(cuda::Norm::LayerNorm, input, weight, bias, shape, eps,
                            zero_centered_gamma, output, rstd);
  norm.mean = cuda::write(mean);
  norm.extra = cuda::read(extra_input);
  norm.sum = save_sum ? cuda::write(sum) : nullptr;
  cuda::norm_forward(cuda::stream_of(input), norm);
}

Tensor add_layer_norm_decomposed(const Tensor& input, const Tensor& extra_input,
                                 const Tensor* weight, const Tensor* bias, const NormShape& shape,
                                 double eps, bool zero_centered_gamma, bool) {
  return layer_norm_decomposed(input + extra_input, weight, bias, shape, eps, zero_centered_gamma);
}

// ---- RMSNorm

constexpr const char* kRMSNorm =
    "add_rms_norm(Tensor input, Tensor extra_input, Tensor? weight, int[] normalized_shape, "
    "float? eps, bool zero_centered_gamma, bool save_sum) -> (Tensor output, Tensor sum, "
    "Tensor rstd)";

TensorSpecs rms_norm_shape(const Checks& check, const Tensor& input, const Tensor& extra_input,
                           const Tensor* weight, const NormShape& shape, std::optional<double>,
                           bool zero_centered_gamma, bool save_sum) {
  check_norm(check, input, weight, nullptr, shape, zero_centered_gamma);
  return outputs(check, input, extra_input, shape, save_sum, 1);
}

void rms_norm_cpu(const Tensor& input, const Tensor& extra_input, const Tensor* weight,
                  const NormShape& shape, std::optional<double> eps, bool zero_centered_gamma,
                  bool save_sum, Tensor& output, Tensor& sum, Tensor& rstd) {
  const cpu::Rows x{input, norm_width(shape)}, extra{extra_input, x.width};
  const cpu::Rows y{output, x.width}, sums{sum, x.width}, rstds{rstd, 1};
  const cpu::NormParameters parameters(input, weight, nullptr, zero_centered_gamma);
  const double epsilon = rms_norm_eps(eps, input);
  // Rows without elements have statistics, too.
  cpu::parallel(rstds.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::add_rms_norm_forward(cpu::kernel_dtype(input), x.read(begin), extra.read(begin),
                              parameters.gamma, epsilon, save_sum ? sums.write(begin) : nullptr,
                              y.write(begin), rstds.write(begin), end - begin, x.width);
  });
}

void rms_norm_cuda(const Tensor& input, const Tensor& extra_input, const Tensor* weight,
                   const NormShape& shape, std::optional<double> eps, bool zero_centered_gamma,
                   bool save_sum, Tensor& output, Tensor& sum, Tensor& rstd) {
  auto norm = cuda::norm_of(cuda::Norm::RMSNorm, input, weight, nullptr, shape,
                            rms_norm_eps(eps, input), zero_centered_gamma, output, rstd);
  norm.extra = cuda::read(extra_input);
  norm.sum = save_sum ? cuda::write(sum) : nullptr;
  cuda::norm_forward(cuda::stream_of(input), norm);
}

Tensor add_rms_norm_decomposed(const Tensor& input, const Tensor& extra_input, const Tensor* weight,
                               const NormShape& shape, std::optional<double> eps,
                               bool zero_centered_gamma, bool) {
  return rms_norm_decomposed(input + extra_input, weight, shape, eps, zero_centered_gamma);
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
                   .overwrites = {"input", "extra_input"},
                   .bodies = {layer_norm_cpu, layer_norm_cuda, add_layer_norm_decomposed},
                   .by_rows = {"input", "extra_input"}}) &&
    register_norm("add_rms_norm", "RMSNorm",
                  {.schema = kRMSNorm,
                   .shape = rms_norm_shape,
                   .overwrites = {"input", "extra_input"},
                   .bodies = {rms_norm_cpu, rms_norm_cuda, add_rms_norm_decomposed},
                   .by_rows = {"input", "extra_input"}});

}  // namespace
}  // namespace transformer_ops::fused::add_norm
