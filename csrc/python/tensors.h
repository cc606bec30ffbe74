// Tensors as Python gives them, for a call in C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "fuser/number_format.h"

namespace transformer_ops::python {

// A tensor that C++ can take: no DTensor, and none whose class wants to see the calls that it takes
// part in.
bool is_plain_tensor(PyObject* object);
// Is it a transformer_ops.QuantizedTensor? That class is given once.
bool is_quantized(PyObject* tensor);
void set_quantized_class(const pybind11::object& type);

// Is it a DTensor? Of one that is a parameter, Python says what its module computes with:
// take_local(module, name, parameter), given once.
bool is_distributed(PyObject* tensor);
void set_take_local(const pybind11::object& take_local);
pybind11::object local_parameter(const pybind11::object& module, const pybind11::object& name,
                                 PyObject* parameter);

// A parameter that is held quantized, by its position among the tensors of a call.
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

// A parameter for C++; false where only Python can take it.
bool add_parameter(PyObject* object, Gathered& call);
// A plan takes the parts of a quantized parameter behind it.
void add_parts(Gathered& call);

}  // namespace transformer_ops::python
