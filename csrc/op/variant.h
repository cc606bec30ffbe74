// The forms in which a typed op is registered: under its own name, and under <name>_into,
// <name>_scaled and <name>_scaled_into (op/typed_op.h).
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

// The forms besides the op itself.
std::vector<Form> forms_of(const TypedOp& op);
std::string name_of(const std::string& base, Form form);

struct Variant {
  Variant(const TypedOp& typed_op, const std::string& base_name, Form its_form);

  const TypedOp& op;
  const std::string base, name, schema;
  const size_t arguments;  // the number of arguments
  const Signature signature;
  std::vector<size_t> overwrites;  // the indices of arguments
  std::vector<bool> lists;         // for each result of `op`: is it a list? Empty if none is
  const Form form;
};

// Variants live as long as the library, and never move.
const Variant& keep_variant(const TypedOp& op, const std::string& base, Form form);
std::vector<const Variant*> all_variants();
// Finds a variant by its own name; returns null if there is none. This includes typed ops that are
// made when they are first looked up (find_typed_op).
const Variant* find_variant(const std::string& name);

}  // namespace transformer_ops
