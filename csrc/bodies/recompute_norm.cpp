#include "bodies/recompute_norm.h"

#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "kernels/norm.h"

namespace transformer_ops {
namespace {

int64_t dims_of(const NormTensors& norm) { return norm.weight ? norm.weight->dim() : 1; }

TensorSpecs normalize_shape(const Args& args, const NormTensors& norm) {
  check_compute_dtype(args, "input", norm.input);
  check_has_rows(args, "input", norm.input);
  const auto check_parameter = [&](const char* name, const Tensor* parameter) {
    if (parameter == nullptr) return;
    check_compute_dtype(args, name, *parameter);
    check_trailing(args, "input", norm.input, *parameter);
    check_same_sizes(args, name, *parameter, *norm.weight);
  };
  check_parameter("weight", norm.weight);
  check_parameter("bias", norm.bias);
  const TensorSpec statistics = row_statistics(norm.input, dims_of(norm));
  if (norm.mean != nullptr) check_spec(args, "mean", *norm.mean, statistics);
  check_spec(args, "rstd", norm.rstd, statistics);
  return {like(norm.input)};
}

void normalize_cpu(const NormTensors& norm, const Tensor& output) {
  const int64_t width = norm.weight ? norm.weight->numel() : norm.input.size(-1);
  const cpu::Rows x{norm.input, width}, y{output, width}, rstd{norm.rstd, 1};
  const auto parameter = [&](const Tensor* tensor, double add) {
    return tensor ? cpu::to_accumulate(*tensor, norm.input, add) : Tensor();
  };
  const Tensor gamma = parameter(norm.weight, norm.zero_centered_gamma ? 1.0 : 0.0);
  const Tensor beta = parameter(norm.bias, 0.0);
  const auto data = [](const Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
  };
  cpu::parallel(x.count(), width, 1, [&](int64_t begin, int64_t end) {
    const void* mean = norm.mean ? cpu::Rows{*norm.mean, 1}.read(begin) : nullptr;
    cpu::normalize(cpu::kernel_dtype(x.tensor), x.read(begin), mean, rstd.read(begin), data(gamma),
                   data(beta), y.write(begin), end - begin, width);
  });
}

void normalize_cuda(const NormTensors& norm, const Tensor& output) {
  const Tensor& x = norm.input;
  const double gamma_add = norm.zero_centered_gamma ? 1.0 : 0.0;
  cuda::normalize(cuda::stream_of(x),
                  {.dtype = kernel_dtype(x),
                   .x = cuda::read(x),
                   .mean = norm.mean ? cuda::read(*norm.mean) : nullptr,
                   .rstd = cuda::read(norm.rstd),
                   .gamma = norm.weight ? cuda::vector(*norm.weight, gamma_add) : cuda::Vector(),
                   .beta = norm.bias ? cuda::vector(*norm.bias) : cuda::Vector(),
                   .y = cuda::write(output),
                   .rows = norm.rstd.numel(),
                   .h = norm.weight ? norm.weight->numel() : x.size(-1)});
}

Tensor normalize_unfused(const NormTensors& norm) {
  Tensor x = to_accumulate(norm.input);
  // Statistics have no trailing dimensions.
  const auto by_row = [&](Tensor statistics) {
    for (int64_t i = 0; i < dims_of(norm); ++i) statistics = statistics.unsqueeze(-1);
    return statistics;
  };
  if (norm.mean != nullptr) x = x - by_row(*norm.mean);
  x = x * by_row(norm.rstd);
  if (norm.weight != nullptr) {
    const Tensor gamma = norm.weight->to(x.scalar_type());
    x = x * (norm.zero_centered_gamma ? gamma + 1 : gamma);
  }
  if (norm.bias != nullptr) x = x + norm.bias->to(x.scalar_type());
  return x.to(norm.input.scalar_type());
}

}  // namespace

TypedOp recompute_norm(const std::string& schema, NormTensors (*tensors)(const Args&)) {
  return {
      .schema = schema,
      .shape = [=](const Args& args) { return normalize_shape(args, tensors(args)); },
      .cpu = [=](const Args& args, Tensors& results) { normalize_cpu(tensors(args), results[0]); },
      .cuda = [=](const Args& args,
                  Tensors& results) { normalize_cuda(tensors(args), results[0]); },
      .unfused = [=](const Args& args) { return Tensors{normalize_unfused(tensors(args))}; },
      .reads_first = false};
}

}  // namespace transformer_ops
