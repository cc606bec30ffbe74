#include "python/tensors.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace transformer_ops::python {
namespace {

namespace py = pybind11;

// transformer_ops.QuantizedTensor
PyObject* quantized_class = nullptr;
PyObject* take_local = nullptr;

// Does the tensor's class intercept calls? Modes are left to torch's ops.
bool has_torch_function(PyObject* tensor) {
  if (THPVariable_CheckTypeExact(Py_TYPE(tensor))) return false;
  static PyObject* const name = PyUnicode_InternFromString("__torch_function__");
  static const py::object& disabled =
      *new py::object(py::module_::import("torch._C").attr("_disabled_torch_function_impl"));
  using at::impl::PythonTorchFunctionTLS;
  if (PythonTorchFunctionTLS::get_disabled_state() != at::impl::TorchFunctionDisabledState::ENABLED)
    return false;
  const auto found = py::reinterpret_steal<py::object>(
      PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(tensor)), name));
  if (!found) PyErr_Clear();
  return found && !found.is(disabled);
}

}  // namespace

bool is_tensor(PyObject* object) {
  auto* const type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  return PyType_IsSubtype(Py_TYPE(object), type) != 0;
}

bool is_plain_tensor(PyObject* object) {
  return is_tensor(object) && !has_torch_function(object) && !is_distributed(object);
}

bool is_distributed(PyObject* tensor) {
  static PyObject* const mesh = PyUnicode_InternFromString("device_mesh");
  PyTypeObject* const type = Py_TYPE(tensor);
  return !THPVariable_CheckTypeExact(type) &&
         PyObject_HasAttr(reinterpret_cast<PyObject*>(type), mesh) == 1;
}

void set_take_local(const py::object& function) {
  Py_XSETREF(take_local, function.inc_ref().ptr());
}

py::object local_parameter(const py::object& module, const py::object& name, PyObject* parameter) {
  PyObject* const arguments[] = {module.ptr(), name.ptr(), parameter};
  const auto found = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(take_local, arguments, std::size(arguments), nullptr));
  if (!found) throw py::error_already_set();
  return found;
}

bool is_quantized(PyObject* tensor) {
  return reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == quantized_class;
}

void set_quantized_class(const py::object& type) {
  Py_XSETREF(quantized_class, type.inc_ref().ptr());
}

bool add_parameter(PyObject* object, Gathered& call) {
  if (!is_plain_tensor(object)) return false;
  if (is_quantized(object)) {
    const auto tensor = py::reinterpret_borrow<py::object>(object);
    call.quantized.push_back(
        {call.tensors.size(), NumberFormat::named(tensor.attr("format").cast<std::string>()),
         tensor.attr("codes").cast<at::Tensor>(), tensor.attr("scale").cast<at::Tensor>()});
  }
  call.tensors.push_back(THPVariable_Unpack(object));
  return true;
}

void add_parts(Gathered& call) {
  for (auto row = call.quantized.rbegin(); row != call.quantized.rend(); ++row) {
    const auto place = call.tensors.begin() + static_cast<std::ptrdiff_t>(row->position) + 1;
    call.tensors.insert(place, {std::move(row->codes), std::move(row->scale)});
  }
}

}  // namespace transformer_ops::python
