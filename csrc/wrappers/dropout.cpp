#include "wrappers/dropout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/where.h>

#include <mutex>

#include "kernels/dropout.h"
#include "wrappers/activation.h"
#include "wrappers/cuda.h"

namespace transformer_ops {
namespace {

// If all elements or none are dropped, no numbers are drawn.
bool draws(double p) { return p > 0 && p < 1; }

}  // namespace

void check_probability(const Checks& check, double p) {
  TORCH_CHECK(p >= 0 && p <= 1, "[", check.op(), "] p must lie in [0, 1], got ", p);
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
