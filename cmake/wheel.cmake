# TRANSFORMER_OPS_WHEEL: the same bytes from every folder. Messages of errors name source files, and
# CMake would write the search path of the build folder first and change it when it installs.
if(TRANSFORMER_OPS_WHEEL)
  set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
  add_compile_options(-ffile-prefix-map=${PROJECT_BINARY_DIR}/= -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=)
  foreach(folder IN LISTS TORCH_INCLUDE_DIRS)
    add_compile_options(-ffile-prefix-map=${folder}/=)
  endforeach()
endif()
