// Python steps for the interpreter.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "executor/host.h"
#include "executor/program.h"

namespace transformer_ops::python {

namespace py = pybind11;

// A program as Python owns it, and data of its last eager call with Python steps.
struct ProgramHandle {
  SharedProgram program;
  std::vector<int64_t> last_shape = {};  // that of the main input
  at::ScalarType last_dtype = at::kFloat;
  std::optional<std::vector<HostCall::SavedSlot>> last_saved = {};
};

// `call`: a transformer_ops.runtime.host.HostCall.
SharedHostCall make_host_call(std::shared_ptr<ProgramHandle> handle, py::object call,
                              const at::Tensor& input);

// An undefined tensor is None in Python.
py::object to_python(const at::Tensor& tensor);
at::Tensor from_python(const py::handle& object);

void bind_host(py::module_& module);

}  // namespace transformer_ops::python
