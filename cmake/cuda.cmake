# TRANSFORMER_OPS_CUDA=AUTO|ON|OFF, as an environment variable or a CMake option. AUTO asks for the
# toolkit and a torch built with CUDA, never for a GPU: a build machine needs none. The default is
# AUTO where there is a GPU, else OFF: what takes minutes to compile could not run there.
#
# Sets TRANSFORMER_OPS_WITH_CUDA, and TRANSFORMER_OPS_CUDA_PYTHON, TRANSFORMER_OPS_CUDA_ASKED and
# TRANSFORMER_OPS_LEFT_OUT for _build_info.py.
set(TRANSFORMER_OPS_CUDA_ASKED "$ENV{TRANSFORMER_OPS_CUDA}")
set(reason "by TRANSFORMER_OPS_CUDA=OFF")
if(DEFINED ENV{TRANSFORMER_OPS_CUDA})
  # Not cached: without the variable, the next build has the default again.
  set(TRANSFORMER_OPS_CUDA $ENV{TRANSFORMER_OPS_CUDA})
elseif(NOT DEFINED TRANSFORMER_OPS_CUDA)
  # What a container is given; a driver before its first use; WSL.
  file(GLOB gpu /dev/nvidiactl /proc/driver/nvidia/version /usr/lib/wsl/lib/libcuda.so.1)
  set(TRANSFORMER_OPS_CUDA AUTO)
  if(NOT gpu)
    set(TRANSFORMER_OPS_CUDA OFF)
    set(reason "for want of a GPU (TRANSFORMER_OPS_CUDA=ON builds it)")
  endif()
endif()
if(NOT TRANSFORMER_OPS_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TRANSFORMER_OPS_CUDA must be AUTO, ON or OFF, got ${TRANSFORMER_OPS_CUDA}")
endif()
set(TRANSFORMER_OPS_WITH_CUDA OFF)
set(TRANSFORMER_OPS_CUDA_PYTHON None)
set(TRANSFORMER_OPS_LEFT_OUT "the CUDA backend, ${reason}")
if(TRANSFORMER_OPS_CUDA STREQUAL "OFF")
  message(STATUS "Building for CPU only, without ${TRANSFORMER_OPS_LEFT_OUT}")
  return()
endif()

# ---- is there all it takes?

find_package(CUDAToolkit QUIET)
set(missing "")
if(NOT CUDAToolkit_NVCC_EXECUTABLE)
  set(missing "a CUDA toolkit with nvcc is needed, found none (set CUDACXX or CUDAToolkit_ROOT)")
elseif(NOT CUDA_cublasLt_LIBRARY)
  set(missing "the CUDA toolkit must have cuBLASLt, found none in ${CUDAToolkit_LIBRARY_DIR}")
elseif(NOT TORCH_CUDA_VERSION)
  set(missing "torch must be built with CUDA, got ${TORCH_VERSION} without")
else()
  string(REGEX MATCH "^[0-9]+" torch_major "${TORCH_CUDA_VERSION}")
  if(NOT CUDAToolkit_VERSION_MAJOR EQUAL torch_major)
    set(missing "the toolkit must be of torch's CUDA ${torch_major}, got ${CUDAToolkit_VERSION}")
  endif()
endif()
if(missing)
  if(TRANSFORMER_OPS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TRANSFORMER_OPS_CUDA=ON: ${missing}")
  endif()
  message(STATUS "TRANSFORMER_OPS_CUDA=AUTO: building for CPU only: ${missing}")
  set(TRANSFORMER_OPS_LEFT_OUT "the CUDA backend: ${missing}")
  return()
endif()

# ---- architectures

# As for torch: "8.0;9.0a;10.0+PTX", split by spaces, commas or semicolons.
set(architectures "8.0;9.0a;10.0+PTX")
if(DEFINED ENV{TORCH_CUDA_ARCH_LIST})
  set(architectures $ENV{TORCH_CUDA_ARCH_LIST})
endif()
string(REGEX REPLACE "[ ,]+" ";" architectures "${architectures}")
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(architecture IN LISTS architectures)
  if(NOT architecture MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
    message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST must hold versions such as 9.0a or 10.0+PTX, got "
                        "${architecture}")
  endif()
  set(number ${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3})
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${number}-real)
  if(CMAKE_MATCH_4)
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${number}-virtual)
  endif()
endforeach()

set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
if(CCACHE_PROGRAM AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
enable_language(CUDA)

set(TRANSFORMER_OPS_WITH_CUDA ON)
set(TRANSFORMER_OPS_LEFT_OUT "")
string(REPLACE ";" " " said_architectures "${architectures}")
set(TRANSFORMER_OPS_CUDA_PYTHON
    "{\"toolkit\": \"${CUDAToolkit_VERSION}\", \"architectures\": \"${architectures}\"}")
message(STATUS "CUDA ${CUDAToolkit_VERSION} for ${architectures}")

# The backend: a library of its own, which registers itself when it is loaded. Only torch's
# libraries are named, not its packages of CUDA headers: nvcc's own toolkit has matching ones.
function(transformer_ops_add_cuda_library)
  file(GLOB kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/kernels/cuda/*.cu
       ${PROJECT_SOURCE_DIR}/csrc/kernels/cuda/*.cpp)
  add_library(transformer_ops_cuda_kernels OBJECT ${kernels})
  set_source_files_properties(
    ${PROJECT_SOURCE_DIR}/csrc/kernels/cuda/fail.cpp
    PROPERTIES COMPILE_DEFINITIONS "TRANSFORMER_OPS_CUDA_ARCHITECTURES=\"${said_architectures}\"")
  target_include_directories(transformer_ops_cuda_kernels PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
  target_link_libraries(transformer_ops_cuda_kernels PRIVATE CUDA::cublasLt CUDA::cudart)
  set(warnings -Wall,-Wextra,-Wno-missing-field-initializers)
  if(TRANSFORMER_OPS_WERROR)
    string(APPEND warnings ",-Werror")
    set(device_warnings "-Werror=all-warnings")
  endif()
  string(REPLACE "," ";" host_warnings ${warnings})
  target_compile_options(
    transformer_ops_cuda_kernels
    PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 --expt-relaxed-constexpr ${device_warnings}
            -Xcompiler=${warnings}> $<$<COMPILE_LANGUAGE:CXX>:${host_warnings}>)

  add_library(transformer_ops_cuda SHARED csrc/cuda/backend.cpp
                                          $<TARGET_OBJECTS:transformer_ops_cuda_kernels>)
  transformer_ops_target(transformer_ops_cuda)
  foreach(name torch_cuda c10_cuda)
    find_library(library_${name} ${name} PATHS ${TORCH_LIBRARY_DIRS} NO_CACHE REQUIRED
                 NO_DEFAULT_PATH)
    target_link_libraries(transformer_ops_cuda PRIVATE ${library_${name}})
  endforeach()
  target_link_libraries(transformer_ops_cuda PRIVATE transformer_ops CUDA::cublasLt CUDA::cudart)
  set_target_properties(transformer_ops_cuda PROPERTIES INSTALL_RPATH "${TRANSFORMER_OPS_RPATH}")
  install(TARGETS transformer_ops_cuda LIBRARY DESTINATION ${TRANSFORMER_OPS_LIBRARY_FOLDER})
endfunction()
