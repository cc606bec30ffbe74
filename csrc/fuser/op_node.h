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
  // Their names, by position; those of a Python op are numbered_names().
  std::vector<std::string> extra_inputs = {};
  std::vector<std::string> extra_outputs = {};
  std::vector<std::string> parameters = {};
  // Per extra input: the (op, extra output) that feeds it, or none for the caller.
  struct Source {
    int op;
    int output;
    bool operator==(const Source&) const = default;
  };
  std::vector<std::optional<Source>> sources = {};
  // Per extra output: does the caller see it?
  std::vector<bool> visible = {};
};

// A native op with the attributes of its declaration; its extra tensors come from the caller and go
// there. Throws PlanError for an undeclared kind, and for attributes other than the declared ones.
OpNode make_op(const std::string& kind, Attributes attributes = {});

// "0", "1", ...
std::vector<std::string> numbered_names(size_t count);

// Where a name stands; -1 where it is none of them.
int position_of(const std::vector<std::string>& names, const std::string& name);

// Those that no channel feeds.
size_t extra_inputs_from_caller(const std::vector<OpNode>& ops);

}  // namespace transformer_ops
