// What is said where a launch cannot be, and that it is said before one.
#include <gtest/gtest.h>

#include <stdexcept>

#include "device_test.h"
#include "kernels/activation.h"
#include "kernels/bias.h"
#include "kernels/cuda/errors.h"
#include "kernels/dropout.h"

namespace transformer_ops::cuda {
namespace {

TEST(Errors, ADriverThatIsTooOld) {
  EXPECT_EQ(driver_is_too_old(12040, 13020),
            "[cuda] driver must support CUDA 13.2, the toolkit of this build, got one for CUDA "
            "12.4; update the driver, or build with a toolkit that it supports");
}

TEST(Errors, AnArchitectureThatIsNotBuilt) {
  EXPECT_EQ(architecture_is_not_built(7, 5, "8.0 9.0a 10.0+PTX"),
            "[cuda] device must be of an architecture in this build (8.0 9.0a 10.0+PTX), got 7.5; "
            "build for it with TORCH_CUDA_ARCH_LIST=7.5");
}

TEST(Errors, MoreBlocksThanALaunchTakes) {
  // None of this memory is there: it is refused before anything runs.
  void* const x = nullptr;
  constexpr int64_t kCount = int64_t{1} << 50;
  const auto error = [&](auto launch) -> std::string {
    try {
      launch();
    } catch (const std::runtime_error& found) {
      return found.what();
    }
    return "none";
  };
  const std::string rule = "[cuda] tensor must take at most 2^31 - 1 blocks of threads, got ";
  EXPECT_EQ(
      error([&] { activation_forward(nullptr, Activation::GELU, DType::BFloat16, x, x, kCount); }),
      rule + std::to_string(kCount / (8 * 4 * 256)));
  EXPECT_EQ(error([&] {
              dropout_backward(nullptr, DType::Float32, x, nullptr, x, 0.5, kCount);
            }).substr(0, rule.size()),
            rule);
  EXPECT_EQ(error([&] {
              bias_add(nullptr, DType::Float32, x, {}, x, kCount / 1024, 1024);
            }).substr(0, rule.size()),
            rule);
}

}  // namespace
}  // namespace transformer_ops::cuda
