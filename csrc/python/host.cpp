#include "python/host.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "executor/backward_pass.h"
#include "executor/deferred_call.h"
#include "executor/main_grad_passes.h"
#include "executor/run.h"
#include "executor/saved.h"
#include "python/tensors.h"

namespace transformer_ops::python {
namespace {

py::list to_python(const Tensors& tensors) {
  py::list list(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) list[i] = python::to_python(tensors[i]);
  return list;
}

py::list to_python(const std::vector<Tensors>& rows) {
  py::list list(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) list[i] = to_python(rows[i]);
  return list;
}

Tensors tensors_from(const py::handle& found) {
  Tensors tensors;
  for (const auto& object : py::cast<py::sequence>(found)) tensors.push_back(from_python(object));
  return tensors;
}

class PythonHostCall : public HostCall {
 public:
  PythonHostCall(std::shared_ptr<ProgramHandle> handle, py::object call, const at::Tensor& input)
      : handle_(std::move(handle)), call_(std::move(call)), dtype_(input.scalar_type()) {
    if (is_real(input)) shape_ = input.sizes().vec();
  }

  ~PythonHostCall() override {
    // At exit, Python may end before the last graph is freed.
    if (!Py_IsInitialized()) {
      call_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    call_ = py::object();
  }

  Tensors forward(int step, const std::vector<at::ScalarType>& dtypes,
                  const Tensors& arguments) override {
    const py::gil_scoped_acquire gil;
    return tensors_from(ask("forward", step, dtypes, to_python(arguments)));
  }

  std::vector<Tensors> saved() override {
    const py::gil_scoped_acquire gil;
    std::vector<Tensors> rows;
    const py::object found = ask("saved");
    for (const auto& row : py::cast<py::sequence>(found)) rows.push_back(tensors_from(row));
    return rows;
  }

  Tensors backward(int step, const BackwardArguments& arguments) override {
    const py::gil_scoped_acquire gil;
    return tensors_from(ask("backward", step, to_python(arguments.grads),
                            to_python(arguments.saved), arguments.dtypes,
                            to_python(arguments.own)));
  }

  std::string forward_method(int step, bool saves) override {
    const py::gil_scoped_acquire gil;
    return py::cast<std::string>(ask("forward_method", step, saves));
  }

  std::string parameter_name(int op, int k) override {
    const py::gil_scoped_acquire gil;
    return py::cast<std::string>(ask("parameter_name", op, k));
  }

  std::optional<Accumulation> accumulation(int op) override {
    const py::gil_scoped_acquire gil;
    const py::object found = ask("accumulation", op);
    if (found.is_none()) return std::nullopt;
    const auto pair = py::cast<py::tuple>(found);
    return Accumulation{tensors_from(pair[0]), py::cast<bool>(pair[1])};
  }

  at::Tensor accumulate(int op, int k, const at::Tensor& gradient) override {
    const py::gil_scoped_acquire gil;
    return from_python(ask("accumulate", op, k, python::to_python(gradient)));
  }

  void note_saved(std::vector<SavedSlot> slots) override {
    const py::gil_scoped_acquire gil;
    handle_->last_saved = std::move(slots);
    handle_->last_shape = shape_;
    handle_->last_dtype = dtype_;
  }

  void delay(int op, std::shared_ptr<const DeferredCall> call) override {
    const py::gil_scoped_acquire gil;
    ask("delay", op, std::const_pointer_cast<DeferredCall>(call));
  }

 private:
  // A user's error passes through C++ to the code that called or ran the backward.
  template <typename... Arguments>
  py::object ask(const char* method, Arguments&&... arguments) {
    try {
      return call_.attr(method)(std::forward<Arguments>(arguments)...);
    } catch (py::error_already_set& error) {
      error.restore();
      python_error raised;
      raised.persist();
      throw raised;
    }
  }

  std::shared_ptr<ProgramHandle> handle_;
  py::object call_;
  std::vector<int64_t> shape_;
  at::ScalarType dtype_;
};

std::vector<at::Tensor> run_with_host(const std::shared_ptr<ProgramHandle>& handle,
                                      const std::vector<at::Tensor>& tensors, py::object call) {
  const SharedHostCall host = make_host_call(handle, std::move(call), tensors.at(0));
  const py::gil_scoped_release no_gil;
  return run(handle->program, tensors, host);
}

py::list slots_to_python(const std::vector<HostCall::SavedSlot>& slots) {
  py::list list;
  for (const auto& slot : slots) {
    list.append(py::make_tuple(slot.op, slot.name, slot.bytes, slot.storage));
  }
  return list;
}

}  // namespace

py::object to_python(const at::Tensor& tensor) {
  if (!tensor.defined()) return py::none();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

at::Tensor from_python(const py::handle& object) {
  if (object.is_none()) return {};
  TORCH_CHECK_TYPE(is_tensor(object.ptr()), "[plan] a step must return tensors or None, got ",
                   Py_TYPE(object.ptr())->tp_name);
  return THPVariable_Unpack(object.ptr());
}

SharedHostCall make_host_call(std::shared_ptr<ProgramHandle> handle, py::object call,
                              const at::Tensor& input) {
  return SharedHostCall(
      std::make_unique<PythonHostCall>(std::move(handle), std::move(call), input));
}

void bind_host(py::module_& module) {
  module.def("last_pass_of", &last_pass_of);
  module.def("note_pass_of", &note_pass_of);
  module.def("forget_passes_of", &forget_passes_of);
  module.def("current_backward_pass", &current_backward_pass,
             "The number of the backward pass that runs, the outermost one; 0 outside of any.");
  py::class_<DeferredCall, std::shared_ptr<DeferredCall>>(module, "DeferredCall")
      .def("run", torch::wrap_pybind_function_no_gil(&DeferredCall::run),
           "The gradient of each tensor of the weight.")
      .def(
          "run_into",
          torch::wrap_pybind_function_no_gil(
              [](const DeferredCall& call, const std::vector<at::Tensor>& buffers, bool overwrite) {
                return call.run_into({buffers, overwrite});
              }),
          "Adds each to its buffer, or writes it there; False where the op cannot.");
  py::class_<ProgramHandle, std::shared_ptr<ProgramHandle>>(module, "Program")
      .def("run", torch::wrap_pybind_function(&run_with_host),
           "The outputs for tensors in plan order; `call` runs the Python steps.")
      .def_property_readonly("slots_read",
                             [](const ProgramHandle& handle) {
                               std::vector<std::pair<int, std::string>> slots;
                               for (const auto& [value, position] : handle.program->saved_slots) {
                                 if (value.kind != Value::Kind::Slot) continue;
                                 slots.emplace_back(value.op, value.name);
                               }
                               return slots;
                             })
      .def_property_readonly("keeps_own",
                             [](const ProgramHandle& handle) { return handle.program->keeps_own; })
      .def("saved_slots_for",
           torch::wrap_pybind_function(
               [](const ProgramHandle& handle, const std::vector<at::Tensor>& tensors) {
                 return slots_to_python(saved_slots_for(*handle.program, tensors));
               }),
           "(op, slot, bytes, storage) of a call with tensors of these sizes.")
      .def_property_readonly("last_saved", [](const ProgramHandle& handle) -> py::object {
        if (!handle.last_saved) return py::none();
        return py::make_tuple(handle.last_shape, handle.last_dtype,
                              slots_to_python(*handle.last_saved));
      });
}

}  // namespace transformer_ops::python
