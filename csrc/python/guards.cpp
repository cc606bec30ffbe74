#include "python/guards.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
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

// The version of a class, which changes with its attributes and those of its bases; 0 if it has
// none at the moment.
uint64_t version_of_class(PyObject* object) {
  auto* const type = reinterpret_cast<PyTypeObject*>(object);
#if PY_VERSION_HEX < 0x030C0000
  if (PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) == 0) return 0;
#endif
  return type->tp_version_tag;
}

// A number that no other dict has, and that changes with the dict; 0 if Python has none (PEP 509).
uint64_t version_of_dict(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  static_cast<void>(dict);
  return 0;
#endif
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

// Null for what is no tensor of known sizes.
const at::Tensor* sized_tensor(PyObject* found) {
  if (found == nullptr || !THPVariable_Check(found)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(found);
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ? nullptr : &tensor;
}

// The dtype and the device of a tensor; nothing for what is no tensor.
std::optional<std::pair<at::ScalarType, at::Device>> storage_of(PyObject* found) {
  if (found == nullptr || !THPVariable_Check(found)) return std::nullopt;
  const at::Tensor& tensor = THPVariable_Unpack(found);
  return std::pair{tensor.scalar_type(), tensor.device()};
}

std::unique_ptr<std::string> boxed(std::string&& text) {
  return std::make_unique<std::string>(std::move(text));
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
  if (PyList_CheckExact(found)) return py::tuple(py::reinterpret_borrow<py::list>(found));
  for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(found)) {
    items.append(key);
    items.append(value);
  }
  return py::tuple(items);
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

bool Guards::is_of_owner(const py::object& object, bool its_dict) const {
  if (!owner_) return false;
  const py::object owner = (*owner_)();
  return object.is(its_dict ? owner.attr("__dict__") : owner);
}

bool Guards::is_new(const py::object& object, const Condition& condition) {
  return known_.emplace(condition.kind, object.ptr(), py::hash(condition.key)).second;
}

void Guards::add_type(const py::object& object, std::string text) {
  auto type = py::reinterpret_borrow<py::object>(type_of(object.ptr()));
  add(object, {.kind = Kind::Type, .expected = std::move(type), .text = boxed(std::move(text))});
}

void Guards::add_attribute(const py::object& object, const py::str& name, std::string text) {
  add(object, {.kind = Kind::Attribute,
               .key = name,
               .expected = attribute_of(object.ptr(), name),
               .text = boxed(std::move(text))});
}

void Guards::add(const py::object& object, Condition condition) {
  if (!is_new(object, condition)) return;
  objects_.push_back({is_of_owner(object, false) ? py::object() : object, std::move(condition)});
}

void Guards::add_class_attribute(const py::type& type, const py::str& name, std::string text) {
  auto value = py::reinterpret_borrow<py::object>(class_attribute_of(type.ptr(), name));
  Condition added{.kind = Kind::Attribute,
                  .key = name,
                  .expected = std::move(value),
                  .text = boxed(std::move(text))};
  auto known = std::ranges::find_if(classes_, [&](const auto& one) { return one.type.is(type); });
  if (known == classes_.end()) known = classes_.insert(known, {.type = type});
  const auto is_known = [&](const Condition& one) { return one.key.equal(name); };
  if (std::ranges::any_of(known->attributes, is_known)) return;
  known->attributes.push_back(std::move(added));
  known->version = 0;
}

void Guards::add_value(const py::dict& dict, const py::str& key, std::string text) {
  auto value = py::reinterpret_borrow<py::object>(value_of(dict.ptr(), key));
  add(dict, {.kind = Kind::Value,
             .key = key,
             .expected = std::move(value),
             .text = boxed(std::move(text))});
}

void Guards::add_items(const py::dict& dict, const py::str& key, std::string text) {
  py::object items = items_of(value_of(dict.ptr(), key));
  add(dict, {.kind = Kind::Items,
             .key = key,
             .expected = std::move(items),
             .text = boxed(std::move(text))});
}

void Guards::add_type_of_value(const py::dict& dict, const py::str& key, std::string text) {
  PyObject* const value = value_of(dict.ptr(), key);
  add(dict, {.kind = Kind::TypeOfValue,
             .storage = storage_of(value),
             .key = key,
             .expected = py::reinterpret_borrow<py::object>(type_of(value)),
             .text = boxed(std::move(text))});
}

void Guards::add_shape(const py::dict& dict, const py::str& key, std::string text) {
  const at::Tensor* const tensor = sized_tensor(value_of(dict.ptr(), key));
  add(dict,
      {.kind = Kind::Shape,
       .key = key,
       .expected = {},
       .shape = tensor ? std::make_unique<std::vector<int64_t>>(tensor->sizes().vec()) : nullptr,
       .text = boxed(std::move(text))});
}

void Guards::add_size(const py::dict& dict, const py::str& key, std::string text) {
  add(dict, {.kind = Kind::Size,
             .key = key,
             .expected = {},
             .size = size_of(value_of(dict.ptr(), key)),
             .text = boxed(std::move(text))});
}

void Guards::add(const py::dict& dict, Condition condition) {
  if (!is_new(dict, condition)) return;
  const py::object stored = is_of_owner(dict, true) ? py::object() : py::object(dict);
  auto known = std::ranges::find_if(dicts_, [&](const auto& one) { return one.dict.is(stored); });
  if (known == dicts_.end()) known = dicts_.insert(known, {.dict = stored});
  auto& conditions = condition.kind == Kind::Value ? known->values : known->others;
  conditions.push_back(std::move(condition));
  known->version = 0;
}

bool Guards::holds(const Condition& condition) {
  switch (condition.kind) {
    case Kind::Size:
      return size_of(condition.found) == condition.size;
    case Kind::Shape: {
      const at::Tensor* const tensor = sized_tensor(condition.found);
      if (!tensor || !condition.shape) return !tensor && !condition.shape;
      return tensor->sizes() == *condition.shape;
    }
    case Kind::Items:
      return has_items(condition.found, condition.expected.ptr());
    default:
      return type_of(condition.found) == condition.expected.ptr() &&
             storage_of(condition.found) == condition.storage;
  }
}

const std::string* Guards::broken() const {
  py::object owner, own;
  if (owner_) {
    owner = (*owner_)();
    own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(owner.ptr(), nullptr));
    if (!own) throw py::error_already_set();
  }
  for (const auto& [type, attributes, version] : classes_) {
    const uint64_t now = version_of_class(type.ptr());
    if (now != 0 && now == version) continue;
    for (const Condition& one : attributes) {
      if (class_attribute_of(type.ptr(), one.key) != one.expected.ptr()) return one.text.get();
    }
    version = now;
  }
  for (const auto& [stored, values, others, version] : dicts_) {
    PyObject* const dict = stored ? stored.ptr() : own.ptr();
    const uint64_t now = version_of_dict(dict);
    const bool has_changed = now == 0 || now != version;
    if (has_changed) {
      for (const Condition& one : values) {
        if (!is_same(value_of(dict, one.key), one.expected.ptr())) return one.text.get();
      }
    }
    for (const Condition& one : others) {
      if (has_changed) one.found = value_of(dict, one.key);
      if (!holds(one)) return one.text.get();
    }
    version = now;
  }
  for (const auto& [stored, one] : objects_) {
    PyObject* const object = stored ? stored.ptr() : owner.ptr();
    const bool holds = one.kind == Kind::Type
                           ? type_of(object) == one.expected.ptr()
                           : is_same(attribute_of(object, one.key).ptr(), one.expected.ptr());
    if (!holds) return one.text.get();
  }
  return nullptr;
}

int Guards::traverse(visitproc visit, void* arg) const {
  const auto visit_all = [&](const py::object& object,
                             std::initializer_list<const std::vector<Condition>*> lists) {
    Py_VISIT(object.ptr());
    for (const auto* const list : lists) {
      for (const Condition& condition : *list) Py_VISIT(condition.expected.ptr());
    }
    return 0;
  };
  for (const auto& one : classes_) {
    if (const int stop = visit_all(one.type, {&one.attributes})) return stop;
  }
  for (const auto& one : dicts_) {
    if (const int stop = visit_all(one.dict, {&one.values, &one.others})) return stop;
  }
  for (const auto& [object, condition] : objects_) {
    Py_VISIT(object.ptr());
    Py_VISIT(condition.expected.ptr());
  }
  return 0;
}

void Guards::clear() {
  classes_.clear();
  dicts_.clear();
  objects_.clear();
  known_.clear();
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
