# Targets torch::torch and torch::python, from the torch of the interpreter. find_package(Torch)
# is no use here: with a CUDA build of torch it stops where there is no CUDA toolkit.
find_package(Python 3.10 COMPONENTS Interpreter REQUIRED)
find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "The headers of ${Python_EXECUTABLE} (Python.h) are missing: install the "
                      "python3-dev (or python3-devel) package of your system")
endif()

set(torch_info ${PROJECT_BINARY_DIR}/torch_info.cmake)
execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/torch_info.py
                OUTPUT_FILE ${torch_info} ERROR_VARIABLE torch_error RESULT_VARIABLE torch_result)
if(NOT torch_result EQUAL 0)
  message(FATAL_ERROR "${torch_error}")
endif()
include(${torch_info})
if(TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "transformer_ops must be built with torch >= 2.11, got ${TORCH_VERSION}")
endif()
message(STATUS "torch ${TORCH_VERSION} of ${Python_EXECUTABLE}")

add_library(torch::torch INTERFACE IMPORTED)
target_include_directories(torch::torch INTERFACE ${TORCH_INCLUDE_DIRS})
target_compile_definitions(torch::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
foreach(name torch torch_cpu c10)
  find_library(library_${name} ${name} PATHS ${TORCH_LIBRARY_DIRS} NO_CACHE REQUIRED
               NO_DEFAULT_PATH)
  target_link_libraries(torch::torch INTERFACE ${library_${name}})
endforeach()

find_library(library_torch_python torch_python PATHS ${TORCH_LIBRARY_DIRS} NO_CACHE REQUIRED
             NO_DEFAULT_PATH)
add_library(torch::python INTERFACE IMPORTED)
target_link_libraries(torch::python INTERFACE torch::torch ${library_torch_python} Python::Module)
