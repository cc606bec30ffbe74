# TRANSFORMER_OPS_WHEEL: no symbols for debuggers, and the same bytes from every folder. Messages of
# errors name source files, and CMake would write the search path of the build folder into a library
# and change it when it installs.
if(TRANSFORMER_OPS_WHEEL)
  add_link_options(-s)
  set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
  foreach(folder IN LISTS PROJECT_BINARY_DIR PROJECT_SOURCE_DIR TORCH_INCLUDE_DIRS)
    add_compile_options(-ffile-prefix-map=${folder}/=)
  endforeach()
endif()
