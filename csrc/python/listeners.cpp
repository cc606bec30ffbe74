// Tells Python what C++ libraries register. A library may be loaded late, and from any thread.
#include <torch/csrc/utils/pybind.h>

#include <atomic>

#include "fuser/registry.h"
#include "op/library.h"
#include "op/typed_op.h"
#include "python/group.h"

namespace transformer_ops::python {
namespace {

// The namespace of the module whose VERSION compiled graphs guard on. It is never freed.
PyObject* module_names = nullptr;
std::atomic<bool> is_scheduled = false;

void write_version() {
  static PyObject* const name = PyUnicode_InternFromString("VERSION");
  PyObject* const version = PyLong_FromLongLong(registry_version());
  if (version == nullptr || PyDict_SetItem(module_names, name, version) != 0) {
    PyErr_WriteUnraisable(module_names);
  }
  Py_XDECREF(version);
}

int write_version_later(void*) {
  is_scheduled = false;
  write_version();
  return 0;
}

// This may run while a library is loaded, under the loader's lock. Waiting for the GIL, or running
// Python code, which releases it, could deadlock with a thread that imports something.
void write_version_now_or_soon() {
  if (!Py_IsInitialized()) return;
  if (PyGILState_Check()) {
    write_version();
  } else if (!is_scheduled.exchange(true) && Py_AddPendingCall(write_version_later, nullptr) != 0) {
    is_scheduled = false;
  }
}

void keep_version_in(py::dict names) {
  module_names = names.release().ptr();
  set_registry_listener(write_version_now_or_soon);
  write_version();
}

void keep_autograd_maker(py::object make) {
  PyObject* const kept = make.release().ptr();
  set_autograd_maker([kept] {
    const py::gil_scoped_acquire gil;
    py::reinterpret_borrow<py::object>(kept)();
  });
}

std::string load_library_from_python(const std::string& path) {
  std::string name;
  try {
    // The GIL is released, because its owner must not wait for the loader's lock: see above.
    const py::gil_scoped_release no_gil;
    name = load_library(path);
  } catch (const c10::Error& error) {
    throw py::import_error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw py::import_error(error.what());
  }
  // The listener could not write it, because it did not have the GIL.
  write_version();
  return name;
}

}  // namespace

void bind_listeners(py::module_& module) {
  module.def("load_library", &load_library_from_python);
  module.def("keep_version_in", &keep_version_in);
  module.def("set_autograd_maker", &keep_autograd_maker);
}

}  // namespace transformer_ops::python
