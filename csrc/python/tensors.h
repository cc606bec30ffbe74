// Conversion of Python tensors for a call in C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "fuser/number_format.h"

namespace transformer_ops::python {

// Is it a tensor, and no object that only says so, such as a mock?
bool is_tensor(PyObject* object);
// Can C++ use the tensor? It must not be a DTensor, and its class must not intercept calls.
bool is_plain_tensor(PyObject* object);
// Is it a transformer_ops.QuantizedTensor? The class is set once.
bool is_quantized(PyObject* tensor);
void set_quantized_class(const pybind11::object& type);

// Is it a DTensor? For a DTensor parameter, take_local(module, name, parameter), which is set once,
// returns what its module computes with.
bool is_distributed(PyObject* tensor);
void set_take_local(const pybind11::object& take_local);
pybind11::object local_parameter(const pybind11::object& module, const pybind11::object& name,
                                 PyObject* parameter);

// A quantized parameter, by its index among the tensors of a call.
struct QuantizedParameter {
  size_t position;
  NumberFormat format;
  at::Tensor codes;
  at::Tensor scale;
};

// The tensors of a call.
struct Gathered {
  std::vector<at::Tensor> tensors;
  std::vector<QuantizedParameter> quantized = {};
};

// Adds a parameter; returns false if only Python can handle it.
bool add_parameter(PyObject* object, Gathered& call);
// Appends the parts of quantized parameters, which plans read.
void add_parts(Gathered& call);

}  // namespace transformer_ops::python
