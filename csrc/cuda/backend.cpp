// The functions of torch's CUDA runtime that the CUDA kernel wrappers need;
// libtransformer_ops_cuda.so installs them.
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>

#include "wrappers/cuda.h"

namespace transformer_ops::cuda {
namespace {

Stream current_stream(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

Philox draw(c10::Device device, uint64_t offsets) {
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device.index());
  const std::lock_guard lock(generator.mutex());
  const at::PhiloxCudaState state =
      at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(offsets);
  if (!state.captured_) return {.seed = state.seed_.val, .offset = state.offset_.val};
  return {.offset = state.offset_intragraph_,
          .seed_at = state.seed_.ptr,
          .offset_at = state.offset_.ptr};
}

[[maybe_unused]] const bool installed = [] {
  static const Backend backend = {c10::DeviceType::CUDA, kernel::rows_of_this_library(),
                                  current_stream, draw};
  set_backend(&backend);
  return true;
}();

}  // namespace
}  // namespace transformer_ops::cuda
