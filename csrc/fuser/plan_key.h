#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fuser/dtype.h"
#include "fuser/policies.h"
#include "fuser/recipe.h"

namespace transformer_ops {

// What a plan may depend on of a tensor.
struct TensorMeta {
  DType dtype = DType::Unknown;
  bool requires_grad = false;  // where gradients are on
  bool is_absent = false;      // an optional one that is None
  NumberFormat format = {};    // in which a parameter is held

  bool operator==(const TensorMeta&) const = default;
};

enum class Device : uint8_t { Cpu, Cuda, Other };

// Everything outside the op list that may change a plan.
struct PlanKey {
  bool grad_enabled = false;
  bool decomposed = false;  // each op by its decomposition, for derivatives of any order
  Policies policies = {};
  Device device = Device::Cpu;
  std::optional<DType> autocast = {};
  const Recipe* recipe = nullptr;        // one of recipe_of()
  std::vector<TensorMeta> tensors = {};  // main input, extra inputs from the caller, parameters
  std::vector<bool> training = {};       // per op; false for one whose plan does not depend on it

  bool operator==(const PlanKey&) const = default;
};

}  // namespace transformer_ops
