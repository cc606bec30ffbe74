#include "python/guards.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

namespace transformer_ops::python {
namespace {

// Returns a borrowed reference; null if the key is absent.
PyObject* value_of(PyObject* dict, const py::str& key) {
  PyObject* const found = PyDict_GetItemWithError(dict, key.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

PyObject* type_of(PyObject* object) {
  return object == nullptr ? nullptr : reinterpret_cast<PyObject*>(Py_TYPE(object));
}

// Returns -1 if it is no dict.
Py_ssize_t size_of(PyObject* found) {
  if (found == nullptr) return 0;
  return PyDict_Check(found) ? PyDict_Size(found) : -1;
}

// Returns a borrowed reference, found without running code of the class; null if there is none.
PyObject* class_attribute_of(PyObject* type, const py::str& name) {
  return _PyType_Lookup(reinterpret_cast<PyTypeObject*>(type), name.ptr());
}

// Returns null if the object has no such attribute.
py::object attribute_of(PyObject* object, const py::str& name) {
  PyObject* const found = PyObject_GetAttr(object, name.ptr());
  if (found == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
    PyErr_Clear();
  }
  return py::reinterpret_steal<py::object>(found);
}

// Returns nothing for what is no tensor.
std::optional<std::vector<int64_t>> shape_of(PyObject* found) {
  if (found == nullptr || !THPVariable_Check(found)) return std::nullopt;
  const at::Tensor& tensor = THPVariable_Unpack(found);
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return std::nullopt;
  return tensor.sizes().vec();
}

bool has_shape(PyObject* found, const std::optional<std::vector<int64_t>>& shape) {
  if (!shape) return !shape_of(found);
  if (found == nullptr || !THPVariable_Check(found)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(found);
  return !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && tensor.sizes() == *shape;
}

bool is_plain(PyObject* object) {
  return PyFloat_CheckExact(object) || PyLong_CheckExact(object) || PyUnicode_CheckExact(object) ||
         PyTuple_CheckExact(object);
}

bool is_same(PyObject* found, PyObject* expected) {
  if (found == expected) return true;
  if (found == nullptr || expected == nullptr) return false;
  if (type_of(found) != type_of(expected) || !is_plain(found)) return false;
  const int equal = PyObject_RichCompareBool(found, expected, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

// A tuple of the items of a list, or of the keys and values of a dict; another object itself.
py::object items_of(PyObject* found) {
  if (found == nullptr || !(PyList_CheckExact(found) || PyDict_CheckExact(found))) {
    return py::reinterpret_borrow<py::object>(found);
  }
  py::list items;
  if (PyDict_CheckExact(found)) {
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(found)) {
      items.append(key);
      items.append(value);
    }
    return py::tuple(items);
  }
  return py::tuple(py::reinterpret_borrow<py::list>(found));
}

// Are these the items that items_of has found?
bool has_items(PyObject* found, PyObject* expected) {
  const bool is_list = found != nullptr && PyList_CheckExact(found);
  const bool is_dict = found != nullptr && PyDict_CheckExact(found);
  if (!is_list && !is_dict) return is_same(found, expected);
  if (expected == nullptr || !PyTuple_CheckExact(expected)) return false;
  const Py_ssize_t size = is_list ? PyList_GET_SIZE(found) : 2 * PyDict_GET_SIZE(found);
  if (size != PyTuple_GET_SIZE(expected)) return false;
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t place = 0;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (is_dict && i % 2 == 0 && PyDict_Next(found, &place, &key, &value) == 0) return false;
    PyObject* const item = is_list ? PyList_GET_ITEM(found, i) : i % 2 == 0 ? key : value;
    if (!is_same(item, PyTuple_GET_ITEM(expected, i))) return false;
  }
  return true;
}

// Returns null before __init__ has run.
Guards* guards_of(PyObject* self) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(self);
  const auto holder = instance->get_value_and_holder();
  return holder.holder_constructed() ? holder.value_ptr<Guards>() : nullptr;
}

int traverse_guards(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Guards* const guards = guards_of(self);
  return guards != nullptr ? guards->traverse(visit, arg) : 0;
}

int clear_guards(PyObject* self) {
  if (Guards* const guards = guards_of(self)) guards->clear();
  return 0;
}

}  // namespace

Guards::Guards(const py::object& owner) {
  if (!owner.is_none()) owner_ = py::weakref(owner);
}

py::object Guards::stored(const py::object& object) const {
  if (!owner_) return object;
  const py::object owner = (*owner_)();
  if (object.is(owner)) return {};
  return object.is(owner.attr("__dict__")) ? py::none() : object;
}

void Guards::add_type(const py::object& object, std::string text) {
  auto type = py::reinterpret_borrow<py::object>(type_of(object.ptr()));
  add({Kind::Type, stored(object), {}, std::move(type), 0, std::move(text)});
}

void Guards::add_attribute(const py::object& object, const py::str& name, std::string text) {
  py::object value = attribute_of(object.ptr(), name);
  add({Kind::Attribute, stored(object), name, std::move(value), 0, std::move(text)});
}

void Guards::add_class_attribute(const py::type& type, const py::str& name, std::string text) {
  auto value = py::reinterpret_borrow<py::object>(class_attribute_of(type.ptr(), name));
  add({Kind::ClassAttribute, type, name, std::move(value), 0, std::move(text)});
}

void Guards::add_value(const py::dict& dict, const py::str& key, std::string text) {
  auto value = py::reinterpret_borrow<py::object>(value_of(dict.ptr(), key));
  add({Kind::Value, stored(dict), key, std::move(value), 0, std::move(text)});
}

void Guards::add_items(const py::dict& dict, const py::str& key, std::string text) {
  py::object items = items_of(value_of(dict.ptr(), key));
  add({Kind::Items, stored(dict), key, std::move(items), 0, std::move(text)});
}

void Guards::add_type_of_value(const py::dict& dict, const py::str& key, std::string text) {
  auto type = py::reinterpret_borrow<py::object>(type_of(value_of(dict.ptr(), key)));
  add({Kind::TypeOfValue, stored(dict), key, std::move(type), 0, std::move(text)});
}

void Guards::add_shape(const py::dict& dict, const py::str& key, std::string text) {
  Condition added{Kind::Shape, stored(dict), key, {}, 0, std::move(text)};
  added.shape = shape_of(value_of(dict.ptr(), key));
  add(std::move(added));
}

void Guards::add_size(const py::dict& dict, const py::str& key, std::string text) {
  const Py_ssize_t size = size_of(value_of(dict.ptr(), key));
  add({Kind::Size, stored(dict), key, {}, size, std::move(text)});
}

void Guards::add(Condition condition) {
  const bool is_new =
      known_.emplace(condition.kind, condition.object.ptr(), py::hash(condition.key)).second;
  if (is_new) conditions_.push_back(std::move(condition));
}

bool Guards::holds(const Condition& condition, PyObject* owner, PyObject* own) {
  const auto& [kind, stored, key, expected, size, text, shape] = condition;
  PyObject* const object = stored ? stored.is_none() ? own : stored.ptr() : owner;
  switch (kind) {
    case Kind::Type:
      return type_of(object) == expected.ptr();
    case Kind::Attribute:
      return is_same(attribute_of(object, key).ptr(), expected.ptr());
    case Kind::ClassAttribute:
      return class_attribute_of(object, key) == expected.ptr();
    case Kind::Value:
      return is_same(value_of(object, key), expected.ptr());
    case Kind::Items:
      return has_items(value_of(object, key), expected.ptr());
    case Kind::TypeOfValue:
      return type_of(value_of(object, key)) == expected.ptr();
    case Kind::Shape:
      return has_shape(value_of(object, key), shape);
    case Kind::Size:
      return size_of(value_of(object, key)) == size;
  }
  return false;
}

const std::string* Guards::broken() const {
  py::object owner, own;
  if (owner_) {
    owner = (*owner_)();
    own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(owner.ptr(), nullptr));
    if (!own) throw py::error_already_set();
  }
  for (const Condition& condition : conditions_) {
    if (!holds(condition, owner.ptr(), own.ptr())) return &condition.text;
  }
  return nullptr;
}

int Guards::traverse(visitproc visit, void* arg) const {
  for (const Condition& condition : conditions_) {
    Py_VISIT(condition.object.ptr());
    Py_VISIT(condition.expected.ptr());
  }
  return 0;
}

void bind_guards(py::module_& module) {
  const auto make_collectable = [](PyHeapTypeObject* type) {
    type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->ht_type.tp_traverse = traverse_guards;
    type->ht_type.tp_clear = clear_guards;
  };
  py::class_<Guards, std::shared_ptr<Guards>>(module, "Guards",
                                              py::custom_type_setup(make_collectable))
      .def(py::init<py::object>())
      .def("add_type", &Guards::add_type)
      .def("add_attribute", &Guards::add_attribute)
      .def("add_class_attribute", &Guards::add_class_attribute)
      .def("add_shape", &Guards::add_shape)
      .def("add_value", &Guards::add_value)
      .def("add_items", &Guards::add_items)
      .def("add_type_of_value", &Guards::add_type_of_value)
      .def("add_size", &Guards::add_size)
      .def("hold", &Guards::hold)
      .def("broken", [](const Guards& guards) -> std::optional<std::string> {
        const std::string* const text = guards.broken();
        return text != nullptr ? std::optional(*text) : std::nullopt;
      });
}

}  // namespace transformer_ops::python
