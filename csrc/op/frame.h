// The kernels of a typed op, which stand around its bodies: they check the arguments, allocate the
// results, and call the body of the device.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>

#include <initializer_list>

#include "op/variant.h"

namespace transformer_ops {

// Registers the schema with torch, and kernels for the CPU, CUDA, Meta and autograd.
void add_to_torch(const Variant& variant);

// Runs a kernel of an op that torch has no schema of: its arguments are on top of the stack, and
// its results take their place.
enum class KernelKind : uint8_t { Meta, Cpu, Cuda };
void run_kernel(const Variant& variant, KernelKind kind, torch::jit::Stack* stack);

// The devices on which a typed op may run, with a kernel of the user's too. The autograd kernel
// makes the Python kernels at the first gradient: a device without it would have no gradients.
const std::initializer_list<c10::DispatchKey>& autograd_keys();
// Does autograd, or forward-mode AD, follow the argument?
bool wants_gradient(const c10::IValue& value);

}  // namespace transformer_ops
