#include "wrappers/dropout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/where.h>

#include <mutex>

#include "kernels/dropout.h"
#include "wrappers/activation.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"

namespace transformer_ops {
namespace {

// If all elements or none are dropped, no numbers are drawn.
bool draws(double p) { return p > 0 && p < 1; }

}  // namespace

void check_probability(const Checks& check, double p) {
  TORCH_CHECK(p >= 0 && p <= 1, "[", check.op(), "] p must lie in [0, 1], got ", p);
}

void drop_cpu(const Tensor& input, double p, const Tensor& output, const Tensor* mask) {
  const cpu::Rows x{input, 1}, y{output, 1};
  const uint64_t seed = draw_seed(p);
  uint8_t* const bits = mask == nullptr ? nullptr : mask->mutable_data_ptr<uint8_t>();
  cpu::parallel(x.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::dropout_forward(cpu::kernel_dtype(input), x.read(begin), y.write(begin),
                         bits == nullptr ? nullptr : bits + begin / 8, seed, p, begin, end - begin);
  });
}

void drop_cuda(const Tensor& input, double p, const Tensor& output, const Tensor* mask) {
  cuda::dropout_forward(cuda::stream_of(input), kernel_dtype(input), cuda::read(input),
                        cuda::write(output),
                        mask == nullptr ? nullptr : mask->mutable_data_ptr<uint8_t>(),
                        draw_philox(input.device(), p), p, input.numel());
}

void apply_mask_cpu(const Tensor& input, const Tensor& mask, double p, const Tensor& output) {
  const cpu::Rows x{input, 1}, y{output, 1};
  const auto* const bits = mask.const_data_ptr<uint8_t>();
  cpu::parallel(x.count(), 1, cpu::kMaskAlign, [&](int64_t begin, int64_t end) {
    cpu::dropout_backward(cpu::kernel_dtype(input), x.read(begin), bits + begin / 8, y.write(begin),
                          p, end - begin);
  });
}

void apply_mask_cuda(const Tensor& input, const Tensor& mask, double p, const Tensor& output) {
  cuda::dropout_backward(cuda::stream_of(input), kernel_dtype(input), cuda::read(input),
                         mask.const_data_ptr<uint8_t>(), cuda::write(output), p, input.numel());
}

Tensor dropout_decomposed(const Tensor& tensor, const Tensor& mask, double p) {
  const Tensor kept = unpack_mask(mask, tensor) != 0;
  return at::where(kept, tensor * (p < 1 ? 1 / (1 - p) : 0.0), 0);
}

uint64_t draw_seed() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

uint64_t draw_seed(double p) { return draws(p) ? draw_seed() : 0; }

cuda::Philox draw_philox(c10::Device device, double p) {
  return draws(p) ? cuda::backend()->draw(device, cuda::kPhiloxOffsets) : cuda::Philox();
}

}  // namespace transformer_ops
