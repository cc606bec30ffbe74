// Delayed scaling for Python: transformer_ops/quantization/delayed.py.
#include "quantization/delayed_scales.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "python/group.h"
#include "python/tensors.h"

namespace transformer_ops::python {
namespace {

using delayed_scaling::Buffers;

struct Names {
  py::str scale = intern("fp8_scale"), amax = intern("fp8_amax"),
          grad_amax = intern("fp8_grad_amax"), history = intern("fp8_amax_history"),
          largest = intern("fp8_largest");

  static py::str intern(const char* name) {
    return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name));
  }
};

at::Tensor buffer(py::handle buffers, const py::str& name) {
  PyObject* const found = PyDict_GetItemWithError(buffers.ptr(), name.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  TORCH_CHECK_TYPE(found != nullptr && is_plain_tensor(found), "[autocast] ", std::string(name),
                   " must be a plain tensor, got ",
                   found == nullptr ? "none" : Py_TYPE(found)->tp_name);
  return THPVariable_Unpack(found);
}

// `owners`: the buffers of each module by name. `reduce`: called with a tensor that it changes in
// place, or None.
void update_scales(const py::list& owners, int64_t margin, bool most_recent,
                   const py::object& reduce) {
  static const Names& names = *new Names;
  std::vector<Buffers> all;
  all.reserve(owners.size());
  for (const py::handle owner : owners) {
    TORCH_CHECK_TYPE(PyDict_Check(owner.ptr()), "[autocast] buffers must be in a dict, got ",
                     Py_TYPE(owner.ptr())->tp_name);
    all.push_back({.scale = buffer(owner, names.scale),
                   .amax = buffer(owner, names.amax),
                   .grad_amax = buffer(owner, names.grad_amax),
                   .history = buffer(owner, names.history),
                   .largest = buffer(owner, names.largest)});
  }
  std::function<void(at::Tensor&)> callback;
  if (!reduce.is_none()) callback = [&](at::Tensor& met) { reduce(met); };
  delayed_scaling::update_scales(all, margin, most_recent, callback);
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].scale.is_same(buffer(owners[i], names.scale))) continue;
    const auto scale = py::reinterpret_steal<py::object>(THPVariable_Wrap(all[i].scale));
    if (!scale || PyDict_SetItem(owners[i].ptr(), names.scale.ptr(), scale.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
}

}  // namespace

void bind_delayed_scales(py::module_& module) {
  module.def("update_scales", torch::wrap_pybind_function(&update_scales));
}

}  // namespace transformer_ops::python
