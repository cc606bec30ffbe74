// What a typed op is registered as: under its own name, and in other forms under names of their
// own, <name>_into, <name>_scaled and <name>_scaled_into (op/typed_op.h).
#pragma once

#include <string>
#include <vector>

#include "op/signature.h"
#include "op/typed_op.h"

namespace transformer_ops {

struct Form {
  bool is_scaled = false;  // takes scales of its operands
  bool is_into = false;    // writes into main_grad

  size_t added_arguments() const { return (is_scaled ? 2 : 0) + (is_into ? 2 : 0); }
};

// Those beside the op itself.
std::vector<Form> forms_of(const TypedOp& op);
std::string name_of(const std::string& base, Form form);

struct Variant {
  Variant(const TypedOp& typed_op, const std::string& base_name, Form its_form);

  const TypedOp& op;
  const std::string base, name, schema;
  const size_t arguments;  // how many there are
  const Signature signature;
  std::vector<size_t> overwrites;  // arguments
  std::vector<bool> lists;         // of each result of `op`: is it a list? Empty where none is
  const Form form;
};

// They live as long as the library, and stay where they are.
const Variant& keep_variant(const TypedOp& op, const std::string& base, Form form);
std::vector<const Variant*> all_variants();
// By its own name; null where there is none. Typed ops that are made when they are first asked for
// (find_typed_op) are there, too.
const Variant* find_variant(const std::string& name);

}  // namespace transformer_ops
