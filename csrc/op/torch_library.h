// The names of typed ops in torch. Ours are "gelu" here and "transformer_ops::gelu" there. Those of
// other libraries have their namespace in both.
#pragma once

#include <torch/library.h>

#include <string>

namespace transformer_ops {

bool has_namespace(const std::string& name);
std::string torch_name(const std::string& name);

// The torch::Library for the namespace of the name. Registrations live as long as the process.
torch::Library& torch_library(const std::string& name);

}  // namespace transformer_ops
