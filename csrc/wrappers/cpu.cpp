#include "wrappers/cpu.h"

#include "kernels/convert.h"
#include "op/typed_op.h"

namespace transformer_ops::cpu {

at::Tensor to_accumulate(const at::Tensor& parameter, const at::Tensor& like, double add) {
  const auto dtype = accumulate_dtype(like.scalar_type());
  if (parameter.scalar_type() == dtype && add == 0.0) return parameter;
  // The kernel converts each dtype only to that dtype's own compute type.
  if (accumulate_dtype(parameter.scalar_type()) != dtype) return parameter.to(dtype).add(add);
  at::Tensor result = empty_cpu(parameter.sizes(), dtype);
  convert_to_acc(kernel_dtype(parameter), parameter.const_data_ptr(), result.mutable_data_ptr(),
                 add, parameter.numel());
  return result;
}

}  // namespace transformer_ops::cpu
