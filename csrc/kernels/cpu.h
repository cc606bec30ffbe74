// What slots of CPU kernels are declared with: kernels on raw, contiguous memory. Each is single
// threaded and works on the range it is given.
//
// "acc" is the compute type: float, or double for Float64. Statistics, gamma, beta, bias and
// column sums are acc arrays. Pointers need no alignment beyond that of their elements. An output
// may be exactly one of the inputs of the same shape; any other overlap is not allowed.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/kernel.h"
#include "kernels/types.h"

namespace transformer_ops::cpu {

using kernel::Activation;
using kernel::DType;
using kernel::Glu;
using kernel::GluKind;

// The kernel for the widest instruction set of this machine that fills the slot. The environment
// variable TRANSFORMER_OPS_ISA=default|avx2|avx512, read on the first call, lowers the choice.
const kernel::Row& find(const char* slot);

// The same for one instruction set, or the next lower one that fills it.
const kernel::Row& find_for(std::string_view isa, const char* slot);

// Whether this machine has it.
bool runs_isa(std::string_view isa);

// Whether this machine has it and the library was built for it.
bool has_isa(std::string_view isa);

const char* isa_name();

template <class Signature>
using Kernel = kernel::Kernel<Signature, find>;

}  // namespace transformer_ops::cpu
