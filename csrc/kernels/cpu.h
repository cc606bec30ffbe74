// Declares slots of CPU kernels: kernels on raw, contiguous memory. Each kernel is single threaded
// and works on the range that it is given.
//
// "acc" is the compute type: float, or double for Float64. Statistics, gamma, beta, bias and column
// sums are acc arrays. Pointers need no more alignment than their elements. An output may be
// exactly one of the inputs of the same shape; any other overlap is not allowed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernel.h"
#include "kernels/types.h"

namespace transformer_ops::cpu {

using kernel::Activation;
using kernel::DType;
using kernel::Glu;
using kernel::GluKind;

// The processor as the library sees it. Every decision that depends on the processor uses this.
struct Processor {
  // The widest level of the processor: avx512_fp16, avx512_bf16, avx512, avx2 or default on x86,
  // neon_bf16 or default on aarch64.
  const char* level;
  // The instruction set of the kernels: the widest that was built, up to the level.
  const char* kernels;
  // Does oneDNN multiply bfloat16 and float16 with instructions of their own? On processors that
  // are neither x86 nor aarch64 both are true, because the library leaves such products to PyTorch.
  bool multiplies_bfloat16;
  bool multiplies_half;
  // Does oneDNN multiply bfloat16 without such instructions, with those for float32?
  bool onednn_emulates_bfloat16;
  // Does it have instructions that convert float16?
  bool converts_half;
  // Does oneDNN multiply float32 faster than MKL?
  bool prefers_onednn;
};

// Describes this machine. The environment variable TRANSFORMER_OPS_ISA, which is read on the first
// call, names a lower level; the library then behaves as on a processor of that level.
const Processor& processor();

// The levels that TRANSFORMER_OPS_ISA may name, the widest first: this machine has them, and the
// library was built for them or for lower ones.
std::vector<std::string> processor_levels();

// The kernel for the slot with the widest instruction set that the processor has.
const kernel::Row& find(const char* slot);

// The same for one instruction set, or the next lower one that has such a kernel.
const kernel::Row& find_for(std::string_view isa, const char* slot);

// Does this machine have an instruction set, whatever TRANSFORMER_OPS_ISA says, and was the library
// built for it?
bool has_isa(std::string_view isa);

template <class Signature>
using Kernel = kernel::Kernel<Signature, find>;

}  // namespace transformer_ops::cpu
