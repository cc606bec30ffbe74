// Plans as plain Python data, for Python steps and explain().
#pragma once

#include <pybind11/pybind11.h>

#include "fuser/rewrite.h"

namespace transformer_ops::python {

namespace py = pybind11;

py::dict plan_to_python(const Plan& plan);
py::list near_misses_to_python(const std::vector<NearMiss>& near_misses);

}  // namespace transformer_ops::python
