# Sets TRANSFORMER_OPS_KERNEL_SOURCES, with the flags of each file. The flags are properties of the
# source files: include this from the CMakeLists.txt that defines the target.
#
# No -ffast-math: NaN and infinity must pass as in PyTorch. "omp simd" marks the loops whose sums
# may be reordered; -fopenmp-simd brings in no OpenMP runtime. Clang would warn of each such loop
# that it cannot vectorize: those in double that call the C library.
set(TRANSFORMER_OPS_KERNEL_SOURCES ${CMAKE_CURRENT_LIST_DIR}/dispatch.cpp)

# Under the sanitizers these files, all of it inlined, would take many minutes each: the checks of
# undefined behaviour and of stack arrays are left out for them. Those of the heap stay.
set(kernel_options -O3 -fno-math-errno -fno-trapping-math -fopenmp-simd -Wno-pass-failed)
if(TRANSFORMER_OPS_SANITIZE)
  list(APPEND kernel_options -O2 -g0 -fno-sanitize=undefined)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND kernel_options --param=asan-stack=0 -fno-sanitize-address-use-after-scope)
  endif()
endif()

macro(transformer_ops_add_isa isa)
  list(APPEND TRANSFORMER_OPS_KERNEL_SOURCES ${CMAKE_CURRENT_LIST_DIR}/kernels_${isa}.cpp)
  set_source_files_properties(
    ${CMAKE_CURRENT_LIST_DIR}/kernels_${isa}.cpp
    PROPERTIES COMPILE_OPTIONS "${kernel_options};${ARGN}")
endmacro()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  transformer_ops_add_isa(default)
  transformer_ops_add_isa(avx2 -ffp-contract=fast -mavx2 -mfma -mf16c)
  transformer_ops_add_isa(avx512 -ffp-contract=fast -mavx2 -mfma -mf16c -mavx512f -mavx512bw
                          -mavx512dq -mavx512vl -mprefer-vector-width=512)
else()
  transformer_ops_add_isa(default -ffp-contract=fast)
endif()
