#include "bodies/dropout.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "bodies/cuda.h"
#include "kernels/dropout.h"

namespace transformer_ops {
namespace {

// Where all or nothing is kept, no number is drawn.
bool draws(double p) { return p > 0 && p < 1; }

}  // namespace

void check_probability(const Args& args, double p) {
  TORCH_CHECK(p >= 0 && p <= 1, "[", args.op(), "] p must lie in [0, 1], got ", p);
}

uint64_t draw_seed(double p) {
  if (!draws(p)) return 0;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

cuda::Philox draw_philox(c10::Device device, double p) {
  return draws(p) ? cuda::backend()->draw(device, cuda::kPhiloxOffsets) : cuda::Philox();
}

}  // namespace transformer_ops
