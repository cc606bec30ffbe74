# Language level, warnings, sanitizers and the compiler cache: what every target of ours shares.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g0 -DNDEBUG")
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Codes depend on two roundings, of a product and of a sum after it. G++ fuses both where the machine
# has an instruction for it, clang does within an expression.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without these two, ccache refuses every file that uses the precompiled header. With comments left
  # out, it would give a header back that is of another text, and be included beside that.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
                                  CCACHE_SLOPPINESS=pch_defines,time_macros
                                  CCACHE_COMMENTS=1 ${CCACHE_PROGRAM})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  endif()
endif()

if(TRANSFORMER_OPS_SANITIZE STREQUAL "thread")
  # Torch's headers hold a fence, which GCC's sanitizer does not know and warns of.
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -g1 -Wno-tsan)
  add_link_options(-fsanitize=thread)
elseif(TRANSFORMER_OPS_SANITIZE)
  # The checks multiply what the optimizer has to read: -O2 takes three times as long to compile.
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all
                      -fno-omit-frame-pointer -g1 -O0)
  add_link_options(-fsanitize=address,undefined)
endif()

function(transformer_ops_target target)
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
  # Designated initializers leave members with a default out on purpose.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-missing-field-initializers
                                           -fno-semantic-interposition)
  if(TRANSFORMER_OPS_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
