#include "python/rename_error.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

namespace transformer_ops::python {
namespace {

namespace py = pybind11;

// Exceptions of types that this library does not raise are not changed.
void rename_message(PyObject* error, const Rename& rename) {
  if (error == nullptr) return;
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(error));
  if (type != PyExc_RuntimeError && type != PyExc_ValueError && type != PyExc_NotImplementedError) {
    return;
  }
  const auto found = py::reinterpret_borrow<py::object>(error);
  const py::tuple arguments = found.attr("args");
  if (arguments.size() != 1 || !py::isinstance<py::str>(arguments[0])) return;
  found.attr("args") = py::make_tuple(rename(arguments[0].cast<std::string>()));
}

}  // namespace

void rename_python_error(const Rename& rename) {
  try {
    throw;
  } catch (python_error& error) {
    const py::gil_scoped_acquire gil;
    error.persist();
    PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
    rename_message(error.value, rename);
  } catch (py::error_already_set& error) {
    const py::gil_scoped_acquire gil;
    rename_message(error.value().ptr(), rename);
  } catch (...) {
    // Other C++ exceptions keep their text.
  }
}

}  // namespace transformer_ops::python
