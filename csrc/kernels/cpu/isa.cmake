# Defines transformer_ops_kernels, to link with: the objects of kernels/cpu, each file but for
# dispatch.cpp once for each instruction set. TRANSFORMER_OPS_KERNEL_OBJECTS names the objects.
#
# A product and a sum may be fused, except in kernels that must give the bits of kernels/encoding.h:
# these hold no fused operation on x86 either way.
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
set(kernel_options -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp-simd
                   -Wno-pass-failed)
foreach(exact quantize rounding round_at_random)
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/${exact}.cpp PROPERTIES
                              COMPILE_OPTIONS -ffp-contract=off)
endforeach()
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

# Widest first. For a library that stays on this machine, TRANSFORMER_OPS_NATIVE builds for the widest
# that it has: these files take 40 % of a build for all. The sanitizers look at each that it has.
set(isas default)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(isas avx512 avx2 default)
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 ${flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl
                   -mprefer-vector-width=512)
  set(needs_avx512 " avx2 .* avx512vl")
  set(needs_avx2 " fma .* avx2")
endif()

set(built)
set(left_out)
foreach(isa IN LISTS isas)
  set(runs_here TRUE)
  if(TRANSFORMER_OPS_NATIVE AND DEFINED needs_${isa} AND EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo runs_here REGEX "^flags.*${needs_${isa}}" LIMIT_COUNT 1)
  endif()
  if(TRANSFORMER_OPS_NATIVE AND (NOT runs_here OR (built AND NOT TRANSFORMER_OPS_SANITIZE)))
    list(APPEND left_out ${isa})
    continue()
  endif()
  transformer_ops_add_isa(${isa} ${flags_${isa}})
  list(APPEND built ${isa})
endforeach()

list(TRANSFORM built REPLACE "(.+)" "\"\\1\"" OUTPUT_VARIABLE names)
list(JOIN names "," names)
target_compile_definitions(transformer_ops_kernels_dispatch PRIVATE "TRANSFORMER_OPS_ISAS=${names}")
if(left_out)
  list(JOIN left_out ", " left_out)
  string(APPEND TRANSFORMER_OPS_LEFT_OUT
    "; CPU kernels for ${left_out} (TRANSFORMER_OPS_NATIVE=OFF builds them)")
  string(REGEX REPLACE "^; " "" TRANSFORMER_OPS_LEFT_OUT "${TRANSFORMER_OPS_LEFT_OUT}")
  message(STATUS "Left out: ${TRANSFORMER_OPS_LEFT_OUT}")
endif()

add_library(transformer_ops_kernels INTERFACE)
target_sources(transformer_ops_kernels INTERFACE ${TRANSFORMER_OPS_KERNEL_OBJECTS})
target_include_directories(transformer_ops_kernels INTERFACE ${PROJECT_SOURCE_DIR}/csrc)
