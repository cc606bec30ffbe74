// Loaded by tests: from then on the CUDA bodies of the typed ops serve CPU tensors, on the emulated
// kernels.
#include <ATen/CPUGeneratorImpl.h>

#include "ops/cuda.h"
#include "ops/typed_op.h"

namespace transformer_ops::cuda {

const Kernels& compiled_kernels();

namespace {

Philox draw(c10::Device, uint64_t) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return {.seed = at::check_generator<at::CPUGeneratorImpl>(generator)->random64(), .offset = 0};
}

[[maybe_unused]] const bool installed = [] {
  static const Backend backend = {&compiled_kernels(),
                                  [](c10::Device) -> Stream { return nullptr; }, draw};
  set_backend(&backend);
  register_cuda_bodies(c10::DispatchKey::CPU);
  return true;
}();

}  // namespace
}  // namespace transformer_ops::cuda
