// The kernels of a typed op as torch calls them: they check the arguments, allocate the results,
// and call the kernel wrapper for the device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>

#include <initializer_list>

#include "op/variant.h"

namespace transformer_ops {

// Registers the schema with torch, and kernels for the CPU, CUDA, Meta and autograd.
void add_to_torch(const Variant& variant);

// Runs a kernel of an op that has no schema in torch. The arguments are on top of the stack, and
// the results replace them.
enum class KernelKind : uint8_t { Meta, Cpu, Cuda };
void run_kernel(const Variant& variant, KernelKind kind, torch::jit::Stack* stack);

// The devices on which a typed op may run, with kernels of users included. Their autograd kernel
// makes the Python kernels at the first gradient; a device without it would have no gradients.
const std::initializer_list<c10::DispatchKey>& autograd_keys();
// Does autograd or forward-mode AD track the argument?
bool wants_gradient(const c10::IValue& value);
// The autograd kernel of ops that only plans call: it raises if an argument requires a gradient.
void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack);

}  // namespace transformer_ops
