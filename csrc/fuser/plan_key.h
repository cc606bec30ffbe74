#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fuser/dtype.h"
#include "fuser/policies.h"
#include "fuser/recipe.h"

namespace transformer_ops {

// The properties of a tensor that a plan may depend on.
struct TensorMeta {
  DType dtype = DType::Unknown;
  bool requires_grad = false;  // only set if gradients are enabled
  bool is_absent = false;      // an optional tensor that is None
  NumberFormat format = {};    // the format in which a parameter is stored

  bool operator==(const TensorMeta&) const = default;
};

enum class Device : uint8_t { Cpu, Cuda, Other };

// Everything besides the list of ops that may change a plan.
struct PlanKey {
  bool grad_enabled = false;
  bool decomposed = false;  // runs each op by its decomposition, for derivatives of any order
  Policies policies = {};
  Device device = Device::Cpu;
  std::optional<DType> autocast = {};
  const Recipe* recipe = nullptr;        // from recipe_of()
  std::vector<TensorMeta> tensors = {};  // main input, extra inputs from the caller, parameters
  std::vector<bool> training = {};       // per op; false for an op whose plan does not depend on it

  bool operator==(const PlanKey&) const = default;
};

}  // namespace transformer_ops
