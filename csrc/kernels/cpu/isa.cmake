# Defines transformer_ops_kernels, to link with: the objects of kernels/cpu, each file but for
# dispatch.cpp once for each instruction set. TRANSFORMER_OPS_KERNEL_OBJECTS names the objects.
#
# No -ffast-math: NaN and infinity must pass as in PyTorch. "omp simd" marks the loops whose sums
# may be reordered; -fopenmp-simd brings in no OpenMP runtime. Clang would warn of each such loop
# that it cannot vectorize: those in double that call the C library.
file(GLOB kernel_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cpp)
list(FILTER kernel_sources EXCLUDE REGEX "/dispatch.cpp$")
add_library(transformer_ops_kernels_dispatch OBJECT ${CMAKE_CURRENT_LIST_DIR}/dispatch.cpp)
transformer_ops_target(transformer_ops_kernels_dispatch)
set(TRANSFORMER_OPS_KERNEL_OBJECTS $<TARGET_OBJECTS:transformer_ops_kernels_dispatch>)

# Under the sanitizers these files, all of it inlined, would take many minutes: the checks of
# undefined behaviour and of stack arrays are left out for them. Those of the heap stay.
set(kernel_options -O3 -fno-math-errno -fno-trapping-math -fopenmp-simd -Wno-pass-failed)
if(TRANSFORMER_OPS_SANITIZE)
  list(APPEND kernel_options -O2 -g0 -fno-sanitize=undefined)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND kernel_options --param=asan-stack=0 -fno-sanitize-address-use-after-scope)
  endif()
endif()

macro(transformer_ops_add_isa isa)
  set(target transformer_ops_kernels_${isa})
  add_library(${target} OBJECT ${kernel_sources})
  transformer_ops_target(${target})
  target_compile_options(${target} PRIVATE ${kernel_options} ${ARGN})
  target_compile_definitions(${target} PRIVATE TRANSFORMER_OPS_ISA="${isa}")
  list(APPEND TRANSFORMER_OPS_KERNEL_OBJECTS $<TARGET_OBJECTS:${target}>)
endmacro()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  transformer_ops_add_isa(default)
  transformer_ops_add_isa(avx2 -ffp-contract=fast -mavx2 -mfma -mf16c)
  # Every x86 machine since 2013 has AVX2, but for the smallest.
  set(runs_here TRUE)
  if(TRANSFORMER_OPS_NATIVE AND EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo runs_here REGEX "^flags.* avx512vl" LIMIT_COUNT 1)
  endif()
  if(NOT runs_here)
    string(APPEND TRANSFORMER_OPS_LEFT_OUT
      "; kernels for AVX-512, which this machine lacks (TRANSFORMER_OPS_NATIVE=OFF builds them)")
    string(REGEX REPLACE "^; " "" TRANSFORMER_OPS_LEFT_OUT "${TRANSFORMER_OPS_LEFT_OUT}")
    message(STATUS "Left out: ${TRANSFORMER_OPS_LEFT_OUT}")
  else()
    transformer_ops_add_isa(avx512 -ffp-contract=fast -mavx2 -mfma -mf16c -mavx512f -mavx512bw
                            -mavx512dq -mavx512vl -mprefer-vector-width=512)
  endif()
else()
  transformer_ops_add_isa(default -ffp-contract=fast)
endif()

add_library(transformer_ops_kernels INTERFACE)
target_sources(transformer_ops_kernels INTERFACE ${TRANSFORMER_OPS_KERNEL_OBJECTS})
target_include_directories(transformer_ops_kernels INTERFACE ${PROJECT_SOURCE_DIR}/csrc)
