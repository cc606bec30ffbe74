# TRANSFORMER_OPS_CUDA=AUTO|ON|OFF, as an environment variable or a CMake option. AUTO asks for the
# toolkit, never for a GPU: a build machine needs none.
if(DEFINED ENV{TRANSFORMER_OPS_CUDA})
  set(TRANSFORMER_OPS_CUDA $ENV{TRANSFORMER_OPS_CUDA} CACHE STRING "AUTO, ON or OFF" FORCE)
else()
  set(TRANSFORMER_OPS_CUDA AUTO CACHE STRING "AUTO, ON or OFF")
endif()

if(TRANSFORMER_OPS_CUDA STREQUAL "ON")
  message(FATAL_ERROR "TRANSFORMER_OPS_CUDA=ON: the CUDA backend is not written yet (see "
                      "csrc/kernels/cuda/README.md); use AUTO or OFF")
elseif(TRANSFORMER_OPS_CUDA STREQUAL "AUTO")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_NVCC_EXECUTABLE)
    message(STATUS "TRANSFORMER_OPS_CUDA=AUTO: found ${CUDAToolkit_NVCC_EXECUTABLE}, but the CUDA "
                   "backend is not written yet; building for CPU only")
  else()
    message(STATUS "TRANSFORMER_OPS_CUDA=AUTO: no CUDA toolkit found; building for CPU only")
  endif()
elseif(NOT TRANSFORMER_OPS_CUDA STREQUAL "OFF")
  message(FATAL_ERROR "TRANSFORMER_OPS_CUDA must be AUTO, ON or OFF, got ${TRANSFORMER_OPS_CUDA}")
endif()
set(TRANSFORMER_OPS_CUDA_PYTHON False)
