// The memory pool for Python: transformer_ops/memory.py.
#include <torch/csrc/Exceptions.h>

#include "op/buffer.h"
#include "python/group.h"

namespace transformer_ops::python {
namespace {

py::tuple memory_stats() {
  const memory::Stats stats = pool().stats();
  return py::make_tuple(stats.in_use_bytes, stats.idle_bytes, stats.peak_in_use_bytes,
                        stats.peak_held_bytes, stats.hits, stats.misses, stats.released_bytes);
}

size_t trim() { return pool().trim(); }
size_t limit() { return pool().limit(); }
void set_limit(size_t bytes) { pool().set_limit(bytes); }

}  // namespace

void bind_memory(py::module_& module) {
  module.def("memory_stats", torch::wrap_pybind_function(&memory_stats));
  module.def("memory_trim", torch::wrap_pybind_function_no_gil(&trim));
  module.def("memory_limit", torch::wrap_pybind_function(&limit));
  module.def("memory_set_limit", torch::wrap_pybind_function_no_gil(&set_limit));
}

}  // namespace transformer_ops::python
