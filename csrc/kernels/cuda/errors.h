// Error texts that explain CUDA's errors to the user of this build.
#pragma once

#include <string>
#include <string_view>

namespace transformer_ops::cuda {

// ---- texts; these are host code that does not call CUDA

// Versions have CUDA's form: 13020 is 13.2.
std::string driver_is_too_old(int driver, int toolkit);
// The device has compute capability major.minor; `built` has the form of TORCH_CUDA_ARCH_LIST.
std::string architecture_is_not_built(int major, int minor, std::string_view built);
std::string too_many_blocks(long long blocks);

// ---- for the current device: throws std::runtime_error for a cudaError_t

[[noreturn]] void fail(int error);

}  // namespace transformer_ops::cuda
