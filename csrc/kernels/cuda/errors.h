// What CUDA's refusals mean for who runs this build.
#pragma once

#include <string>
#include <string_view>

namespace transformer_ops::cuda {

// ---- texts: host code, of what it is told

// Versions as CUDA gives them: 13020 is 13.2.
std::string driver_is_too_old(int driver, int toolkit);
// A device of compute capability major.minor; `built` as in TORCH_CUDA_ARCH_LIST.
std::string architecture_is_not_built(int major, int minor, std::string_view built);
std::string too_many_blocks(long long blocks);

// ---- of the current device: throws std::runtime_error for a cudaError_t

[[noreturn]] void fail(int error);

}  // namespace transformer_ops::cuda
