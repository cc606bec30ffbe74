#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fuser/attribute.h"
#include "fuser/dtype.h"

namespace transformer_ops {

struct TensorFacts {
  DType dtype = DType::Unknown;
  bool requires_grad = false;

  bool operator==(const TensorFacts&) const = default;
};

// One basic op of a group, as its module describes it.
struct OpNode {
  std::string kind;
  Attributes attributes = {};
  bool native = true;
  int extra_inputs = 0;
  int extra_outputs = 0;
  int parameters = 0;
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

// Everything outside the op list that may change a plan; the key of the plan cache.
struct Facts {
  bool grad_enabled = false;
  TensorFacts input = {};
  std::vector<TensorFacts> extra_inputs = {};             // from the caller, in order
  std::vector<std::vector<TensorFacts>> parameters = {};  // per op
  std::vector<bool> training = {};                        // per op
  std::string device = "cpu";
  std::optional<DType> autocast = {};
  bool recompute = false;  // cheap outputs in backward instead of saving them

  bool operator==(const Facts&) const = default;
};

}  // namespace transformer_ops
