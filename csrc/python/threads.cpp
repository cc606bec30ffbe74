// How loops are divided between threads, for benchmarks/threads.py and the tests.
#include <torch/csrc/utils/pybind.h>

#include "op/split.h"
#include "python/group.h"

namespace transformer_ops::python {

void bind_threads(py::module_& module) {
  module.def("threads_of_loop", [](int64_t count, int64_t work, int64_t align, int64_t threads) {
    return cpu::split_loop(count, work, align).active(threads);
  });
  module.def("parts_of_sum", &cpu::sum_parts);
  module.def("groups_side_by_side", &cpu::groups_side_by_side);
}

}  // namespace transformer_ops::python
