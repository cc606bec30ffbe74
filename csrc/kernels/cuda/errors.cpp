#include "kernels/cuda/errors.h"

namespace transformer_ops::cuda {
namespace {

std::string version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace

std::string driver_is_too_old(int driver, int toolkit) {
  return "[cuda] driver must support CUDA " + version(toolkit) +
         ", the toolkit of this build, got one for CUDA " + version(driver) +
         "; update the driver, or build with a toolkit that it supports";
}

std::string architecture_is_not_built(int major, int minor, std::string_view built) {
  const std::string architecture = std::to_string(major) + "." + std::to_string(minor);
  return "[cuda] device must be of an architecture in this build (" + std::string(built) +
         "), got " + architecture + "; build for it with TORCH_CUDA_ARCH_LIST=" + architecture;
}

std::string too_many_blocks(long long blocks) {
  return "[cuda] tensor must take at most 2^31 - 1 blocks of threads, got " +
         std::to_string(blocks);
}

}  // namespace transformer_ops::cuda
