# What threads share is built with the thread sanitizer: fuser, memory, executor, runtime and the frame
# of the ops. The ops themselves and the kernels, which take minutes, are objects of another build.
transformer_ops_glob(library_sources library.cpp executor/*.cpp runtime/*.cpp op/*.cpp)
set(built ${TRANSFORMER_OPS_PLAIN_BUILD}/CMakeFiles)
set(objects ${built}/transformer_ops.dir)
set(op_objects "")
foreach(folder wrappers quantization ops fusions)
  if(TRANSFORMER_OPS_UNITY)
    file(GLOB found CONFIGURE_DEPENDS ${objects}/Unity/unity_${folder}_*.o)
  else()
    file(GLOB found CONFIGURE_DEPENDS ${objects}/csrc/${folder}/*.o)
  endif()
  list(APPEND op_objects ${found})
endforeach()
set(TRANSFORMER_OPS_KERNELS ${TRANSFORMER_OPS_PLAIN_BUILD}/libtransformer_ops_kernels.so)
if(NOT op_objects OR NOT EXISTS ${TRANSFORMER_OPS_KERNELS})
  message(FATAL_ERROR "TRANSFORMER_OPS_PLAIN_BUILD must name the folder of a build without "
                      "sanitizer, got '${TRANSFORMER_OPS_PLAIN_BUILD}'")
endif()
# Linked last: of an inline function that both builds have, the linker keeps the first copy, which
# must be one that the sanitizer sees.
set(plain_objects ${op_objects})
