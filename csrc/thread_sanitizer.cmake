# What threads share is built with the thread sanitizer: fuser, memory, executor and the frame of the
# ops. The ops themselves and the kernels, which take minutes, are objects of another build.
transformer_ops_glob(library_sources library.cpp executor/*.cpp ops/buffer.cpp ops/op.cpp
                     ops/typed_op.cpp)
set(built ${TRANSFORMER_OPS_PLAIN_BUILD}/CMakeFiles)
file(GLOB op_objects CONFIGURE_DEPENDS ${built}/transformer_ops.dir/csrc/ops/*.o
     ${built}/transformer_ops.dir/csrc/fusions/*.o)
list(FILTER op_objects EXCLUDE REGEX "/ops/(buffer|op|typed_op)\\.cpp\\.o$")
file(GLOB_RECURSE kernel_objects CONFIGURE_DEPENDS ${built}/transformer_ops_kernels.dir/*.o)
if(NOT op_objects OR NOT kernel_objects)
  message(FATAL_ERROR "TRANSFORMER_OPS_PLAIN_BUILD must name the folder of a build without "
                      "sanitizer, got '${TRANSFORMER_OPS_PLAIN_BUILD}'")
endif()
list(APPEND library_sources ${op_objects})
set_source_files_properties(${op_objects} ${kernel_objects} PROPERTIES EXTERNAL_OBJECT ON)
