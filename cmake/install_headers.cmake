# Copies the public headers to transformer_ops/include/transformer_ops. There they include each other
# by that folder's name: one include path serves, and no header of the caller's takes the place of
# one of ours.
set(destination "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/transformer_ops/include/transformer_ops")
file(REMOVE_RECURSE "${destination}")
list(TRANSFORM TRANSFORMER_OPS_PUBLIC_HEADERS PREPEND "${TRANSFORMER_OPS_CSRC}/")
file(GLOB headers RELATIVE "${TRANSFORMER_OPS_CSRC}" ${TRANSFORMER_OPS_PUBLIC_HEADERS})
foreach(header ${headers})
  file(READ "${TRANSFORMER_OPS_CSRC}/${header}" text)
  string(REGEX REPLACE "#include \"([^\"]+)\"" "#include \"transformer_ops/\\1\"" text "${text}")
  file(WRITE "${destination}/${header}" "${text}")
endforeach()
