// Typed ops as torch knows them. Ours are called "gelu" here and "transformer_ops::gelu" there;
// those of other libraries have their namespace in both places.
#pragma once

#include <torch/library.h>

#include <string>

namespace transformer_ops {

bool has_namespace(const std::string& name);
std::string torch_name(const std::string& name);

// What registers the ops of the name's namespace. Registrations live as long as the process.
torch::Library& torch_library(const std::string& name);

}  // namespace transformer_ops
