// What plans take for granted of modules that know nothing of them, looked at before each call.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace transformer_ops::python {

namespace py = pybind11;

// Conditions that held when they were added. Each has a text that says what it means if it does not
// hold any more.
class Guards {
 public:
  // The class of an object.
  void add_type(const py::object& object, std::string text);
  // The attribute of that name, such as the `forward` of a class: the same object.
  void add_attribute(const py::object& object, const py::str& name, std::string text);
  // The value of a key of a dict, which may be absent: the same object, or an equal number, string
  // or tuple.
  void add_value(const py::dict& dict, const py::str& key, std::string text);
  // The class of the value of a key.
  void add_type_of_value(const py::dict& dict, const py::str& key, std::string text);
  // How many entries the value of a key has, a dict; none where it is absent.
  void add_size(const py::dict& dict, const py::str& key, std::string text);

  bool hold() const { return broken() == nullptr; }
  // The text of the first condition that does not hold; null if all do.
  const std::string* broken() const;

  // For Python's collector: all Python objects that it holds, and letting go of them.
  int traverse(visitproc visit, void* arg) const;
  void clear() { conditions_.clear(); }

 private:
  enum class Kind { Type, Attribute, Value, TypeOfValue, Size };
  struct Condition {
    Kind kind;
    py::object object;
    py::str key;
    py::object expected;  // null where nothing is
    Py_ssize_t size = 0;
    std::string text;
  };

  static bool holds(const Condition& condition);

  std::vector<Condition> conditions_;
};

void bind_guards(py::module_& module);

}  // namespace transformer_ops::python
