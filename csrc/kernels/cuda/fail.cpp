// Queries CUDA for the numbers in the texts of errors.h.
#include <cuda_runtime_api.h>

#include <stdexcept>

#include "kernels/cuda/errors.h"

namespace transformer_ops::cuda {
namespace {

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
                 cudaDeviceGetAttribute(&value, which, device) == cudaSuccess
             ? value
             : 0;
}

std::string text(cudaError_t error) {
  switch (error) {
    // The driver cannot compile PTX of a later toolkit.
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorInsufficientDriver: {
      int driver = 0;
      cudaDriverGetVersion(&driver);
      return driver_is_too_old(driver, CUDART_VERSION);
    }
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:  // cudaFuncSetAttribute reports the same error so
      return architecture_is_not_built(attribute(cudaDevAttrComputeCapabilityMajor),
                                       attribute(cudaDevAttrComputeCapabilityMinor),
                                       TRANSFORMER_OPS_CUDA_ARCHITECTURES);
    default:
      return std::string("[cuda] launch must succeed, got ") + cudaGetErrorString(error);
  }
}

}  // namespace

void fail(int error) {
  // This clears the error, so that torch's next check of its own launch does not find it.
  cudaGetLastError();
  throw std::runtime_error(text(static_cast<cudaError_t>(error)));
}

}  // namespace transformer_ops::cuda
