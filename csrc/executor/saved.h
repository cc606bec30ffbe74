// How many bytes a plan keeps for backward, by slot; parameters are left out.
#pragma once

#include "executor/host.h"
#include "executor/program.h"

namespace transformer_ops {

using SavedSlots = std::vector<HostCall::SavedSlot>;

// What one call keeps: `saved` by the program's slots, `own` for the contexts of host steps.
// `tensors` are those of the plan.
SavedSlots saved_slots(const Program& program, at::TensorList tensors, const Tensors& saved,
                       const std::vector<Tensors>& own);

// What a call would keep of a program of native steps, found on the meta device.
SavedSlots saved_slots_for(const Program& program, at::TensorList tensors);

// Is it a tensor of its own memory, neither meta nor of a trace?
bool is_real(const at::Tensor& tensor);

// The forward values of a program of native steps, on the meta device. `tensors` give sizes and
// dtypes.
Tensors run_on_meta(const Program& program, at::TensorList tensors);

}  // namespace transformer_ops
