// The bytes that a plan saves for backward, by slot, without parameters.
#pragma once

#include "executor/host.h"
#include "executor/program.h"
#include "executor/tensor_metadata.h"

namespace transformer_ops {

using SavedSlots = std::vector<HostCall::SavedSlot>;

// The bytes that one call saves: `saved` by the program's slots, `own` for the contexts of host
// steps. `tensors` are those of the plan.
SavedSlots saved_slots(const Program& program, at::TensorList tensors, const Tensors& saved,
                       const std::vector<Tensors>& own);

// The bytes that a call of a native program would save, found on the meta device.
SavedSlots saved_slots_for(const Program& program, at::TensorList tensors);

// The forward values of a native program on the meta device. `tensors` give sizes and dtypes.
Tensors run_on_meta(const Program& program, at::TensorList tensors);

}  // namespace transformer_ops
