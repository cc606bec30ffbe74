# The libraries of an earlier build, in this layout and in that of version 0.1's first builds: only one
# minor version of torch is installed at a time, because all share the kernels.
set(package "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/transformer_ops")
file(GLOB earlier "${package}/*.so" "${package}/_build_info.py")
file(REMOVE_RECURSE "${package}/lib" ${earlier})
