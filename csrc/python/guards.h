// What plans assume about modules that do not know about them; it is checked before each call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace transformer_ops::python {

namespace py = pybind11;

// Conditions that were true when they were added. Each has a text for the case that it is no longer
// true.
class Guards {
 public:
  // The guards do not keep this module alive, which owns them; None for no such module.
  explicit Guards(const py::object& owner);

  // The class of an object must be the same.
  void add_type(const py::object& object, std::string text);
  // The attribute of that name, which may be absent, must be the same object, or an equal number,
  // string or tuple. Reading it may run code of the object's class.
  void add_attribute(const py::object& object, const py::str& name, std::string text);
  // The class or its bases must have the same attribute of that name, such as `forward`, or none.
  void add_class_attribute(const py::type& type, const py::str& name, std::string text);
  // The value of a key of a dict, which may be absent, must be the same object, or an equal number,
  // string or tuple.
  void add_value(const py::dict& dict, const py::str& key, std::string text);
  // The value of a key, a list or dict, must have the same items, compared as values are; another
  // value is compared itself.
  void add_items(const py::dict& dict, const py::str& key, std::string text);
  // The class of the value of a key must be the same; of a tensor, its dtype and device, too.
  void add_type_of_value(const py::dict& dict, const py::str& key, std::string text);
  // The value of a key must be a tensor of the same shape, or no tensor as before.
  void add_shape(const py::dict& dict, const py::str& key, std::string text);
  // The value of a key, a dict, must have the same number of entries; an absent one has none.
  void add_size(const py::dict& dict, const py::str& key, std::string text);

  bool hold() const { return broken() == nullptr; }
  // The text of the first condition that is not true; null if all are.
  const std::string* broken() const;

  // For Python's garbage collector: visits all Python objects, and releases them.
  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  enum class Kind { Type, Attribute, Value, Items, TypeOfValue, Shape, Size };
  // Checking reads many of these in turn: what it seldom reads is elsewhere.
  struct Condition {
    Kind kind;
    std::optional<std::pair<at::ScalarType, at::Device>> storage = {};
    py::str key;
    py::object expected;  // null if the key is absent
    Py_ssize_t size = 0;
    mutable PyObject* found = nullptr;                            // the value of the key, borrowed
    std::unique_ptr<const std::vector<int64_t>> shape = nullptr;  // null for what is no tensor
    std::unique_ptr<const std::string> text;
  };
  // Nothing is looked up while the dict has the version at which all conditions were true.
  struct DictConditions {
    py::object dict;                     // null for the __dict__ of the owner
    std::vector<Condition> values = {};  // true as long as the dict does not change
    std::vector<Condition> others = {};
    mutable uint64_t version = 0;
  };
  struct ClassConditions {
    py::object type;
    std::vector<Condition> attributes = {};
    mutable uint64_t version = 0;
  };
  struct ObjectCondition {
    py::object object;  // null for the owner
    Condition condition;
  };

  static bool holds(const Condition& condition);
  // Does nothing for a condition that is there.
  void add(const py::dict& dict, Condition condition);
  void add(const py::object& object, Condition condition);
  // Notes a condition on an object.
  bool is_new(const py::object& object, const Condition& condition);
  bool is_of_owner(const py::object& object, bool its_dict) const;

  std::optional<py::weakref> owner_;

  std::vector<ClassConditions> classes_;
  std::vector<DictConditions> dicts_;
  std::vector<ObjectCondition> objects_;
  std::set<std::tuple<Kind, const PyObject*, Py_ssize_t>> known_;  // by kind, object and key
};

void bind_guards(py::module_& module);

}  // namespace transformer_ops::python
