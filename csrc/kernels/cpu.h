// What slots of CPU kernels are declared with: kernels on raw, contiguous memory. Each is single
// threaded and works on the range it is given.
//
// "acc" is the compute type: float, or double for Float64. Statistics, gamma, beta, bias and
// column sums are acc arrays. Pointers need no alignment beyond that of their elements. An output
// may be exactly one of the inputs of the same shape; any other overlap is not allowed.
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

// What the library takes the processor for: all that it decides by the processor follows from this.
struct Processor {
  // The widest that the processor has of avx512_fp16, avx512_bf16, avx512, avx2 and default.
  const char* level;
  // The instruction set of the kernels: the widest that was built, up to the level.
  const char* kernels;
  // Whether it has instructions for products of bfloat16 and of float16. Only an x86 processor may
  // lack them: on others the library leaves such products to PyTorch.
  bool multiplies_bfloat16;
  bool multiplies_half;
  // Whether oneDNN multiplies bfloat16 without such instructions, by those for float32.
  bool onednn_emulates_bfloat16;
  // Whether it has instructions that convert float16.
  bool converts_half;
  // Whether oneDNN multiplies float32 faster than MKL does.
  bool prefers_onednn;
};

// Describes this machine. The environment variable TRANSFORMER_OPS_ISA, read on the first call,
// names a lower level, and the library behaves as on a processor that has no more.
const Processor& processor();

// The levels that TRANSFORMER_OPS_ISA may name: this machine has them, and the library was built
// for them or for lower ones. Widest first.
std::vector<std::string> processor_levels();

// The kernel of the widest instruction set that fills the slot, up to that of the processor.
const kernel::Row& find(const char* slot);

// The same for one instruction set, or the next lower one that fills it.
const kernel::Row& find_for(std::string_view isa, const char* slot);

// Whether this machine has an instruction set of kernels, whatever TRANSFORMER_OPS_ISA says, and
// the library was built for it.
bool has_isa(std::string_view isa);

template <class Signature>
using Kernel = kernel::Kernel<Signature, find>;

}  // namespace transformer_ops::cpu
