#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fuser/attribute.h"

namespace transformer_ops {

// One basic op of a group, as its module describes it.
struct OpNode {
  std::string kind;
  Attributes attributes = {};
  bool native = true;
  // The names in order; those of a Python op are numbered_names().
  std::vector<std::string> extra_inputs = {};
  std::vector<std::string> extra_outputs = {};
  std::vector<std::string> parameters = {};
  // For each extra input, the (op, extra output) that it reads, or none if the caller passes it.
  struct Source {
    int op;
    int output;
    bool operator==(const Source&) const = default;
  };
  std::vector<std::optional<Source>> sources = {};
  // For each extra output: is it returned to the caller?
  std::vector<bool> visible = {};
};

// Makes a native op with the attributes of its declaration. Its extra inputs come from the caller,
// and its extra outputs go to the caller. Throws PlanError if the kind is not declared, or if the
// attributes are not the declared ones.
OpNode make_op(const std::string& kind, Attributes attributes = {});

// Returns "0", "1", ...
std::vector<std::string> numbered_names(size_t count);

// The index of a name; -1 if it is not in the list.
int position_of(const std::vector<std::string>& names, const std::string& name);

// The number of extra inputs that the caller passes.
size_t extra_inputs_from_caller(const std::vector<OpNode>& ops);

}  // namespace transformer_ops
