// The batching rule of all typed ops for `is_grads_batched` and `vectorize` of torch.autograd: a
// call for each element of the batch.
#pragma once

#include <torch/library.h>

#include <string>

namespace transformer_ops {

// Registers the rule for an op of this name that is defined in the library.
void add_batching(torch::Library& library, const std::string& name);

}  // namespace transformer_ops
