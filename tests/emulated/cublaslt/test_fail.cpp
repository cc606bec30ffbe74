// What fail.cpp asks of CUDA's runtime, answered by fake.cpp.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "fake.h"
#include "kernels/cuda/errors.h"

namespace transformer_ops::cuda {
namespace {

std::string text_of(cudaError_t error) {
  try {
    fail(error);
  } catch (const std::runtime_error& found) {
    return found.what();
  }
}

TEST(Fail, NamesDriverAndToolkit) {
  const std::string text = driver_is_too_old(12040, CUDART_VERSION);
  EXPECT_EQ(text_of(cudaErrorInsufficientDriver), text);
  EXPECT_EQ(text_of(cudaErrorUnsupportedPtxVersion), text);
}

TEST(Fail, NamesTheDevicesArchitectureAndThoseOfTheBuild) {
  const std::string text = architecture_is_not_built(7, 5, "8.0 9.0a");
  EXPECT_EQ(text_of(cudaErrorNoKernelImageForDevice), text);
  EXPECT_EQ(text_of(cudaErrorInvalidDeviceFunction), text);
}

TEST(Fail, LeavesNoErrorForTheNextToFind) {
  const int before = fake().cleared;
  text_of(cudaErrorLaunchOutOfResources);
  EXPECT_EQ(fake().cleared, before + 1);
}

TEST(Fail, NamesAnyOtherError) {
  EXPECT_EQ(text_of(cudaErrorLaunchOutOfResources), "[cuda] launch must succeed, got an error");
}

}  // namespace
}  // namespace transformer_ops::cuda
