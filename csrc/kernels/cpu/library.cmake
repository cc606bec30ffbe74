# transformer_ops_kernels_library, the CPU kernels as a library without torch: those built here, or
# those that TRANSFORMER_OPS_KERNELS names.
if(TRANSFORMER_OPS_KERNELS)
  if(NOT EXISTS "${TRANSFORMER_OPS_KERNELS}")
    message(FATAL_ERROR "TRANSFORMER_OPS_KERNELS must be a built libtransformer_ops_kernels.so, got "
                        "${TRANSFORMER_OPS_KERNELS}")
  endif()
  add_library(transformer_ops_kernels_library SHARED IMPORTED)
  set_target_properties(transformer_ops_kernels_library PROPERTIES
                        IMPORTED_LOCATION "${TRANSFORMER_OPS_KERNELS}")
else()
  add_library(transformer_ops_kernels_library SHARED ${TRANSFORMER_OPS_KERNEL_OBJECTS})
  # Inline functions of the kernels may be compiled for AVX-512: no other library may find them.
  set(exports ${CMAKE_CURRENT_LIST_DIR}/exports.map)
  target_link_options(transformer_ops_kernels_library PRIVATE -Wl,--version-script=${exports} -Wl,-z,defs)
  set_target_properties(transformer_ops_kernels_library PROPERTIES OUTPUT_NAME transformer_ops_kernels
                        LINKER_LANGUAGE CXX LINK_DEPENDS ${exports})
endif()
