// Loaded by tests: from then on the CUDA bodies of the typed ops serve CPU tensors, on the emulated
// kernels. torch.ops.transformer_ops_emulated.products() tells what cuBLASLt was asked for.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <sstream>

#include "gemm.h"
#include "op/typed_op.h"
#include "wrappers/cuda.h"

namespace transformer_ops::cuda {
namespace {

Philox draw(c10::Device, uint64_t) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return {.seed = at::check_generator<at::CPUGeneratorImpl>(generator)->random64(), .offset = 0};
}

const char* text(LtEpilogue epilogue) {
  switch (epilogue) {
    case LtEpilogue::Default:
      return "plain";
    case LtEpilogue::Bias:
      return "bias";
    case LtEpilogue::GeluBias:
      return "gelu_bias";
    case LtEpilogue::GeluAuxBias:
      return "gelu_aux_bias";
    case LtEpilogue::BgradB:
      break;
  }
  return "bgradb";
}

const char* text(DType dtype) {
  switch (dtype) {
    case DType::Float16:
      return "float16";
    case DType::BFloat16:
      return "bfloat16";
    case DType::Float32:
      return "float32";
    case DType::Float64:
      break;
  }
  return "float64";
}

std::string text(DType dtype, Codes codes, Scaling scaling) {
  if (codes == Codes::None) return text(dtype);
  if (codes == Codes::E2M1) return scaling == Scaling::Vectors16 ? "nvfp4" : "e2m1";
  const std::string name = codes == Codes::E4M3 ? "e4m3" : "e5m2";
  if (scaling == Scaling::Vectors128) return name + "/1x128";
  if (scaling == Scaling::Vectors32) return name + "/mx";
  return scaling == Scaling::Blocks128 ? name + "/128x128" : name;
}

// "epilogue m x n x k dtype -> dtype [beta] [fast]" of each product since the last call, row-major;
// the dtypes of both operands where they are codes, with the blocks that have a scale.
std::vector<std::string> products() {
  std::vector<std::string> found;
  for (const GemmPlan& plan : take_products()) {
    const LtProblem& problem = plan.problem;
    const int64_t k = problem.transpose_a ? problem.a.rows : problem.a.cols;
    std::ostringstream line;
    line << text(problem.epilogue) << ' ' << problem.d.cols << 'x' << problem.d.rows << 'x' << k
         << ' ' << text(problem.dtype, problem.b_codes, problem.b_scaling);
    if (problem.a_codes != Codes::None) {
      line << ' ' << text(problem.dtype, problem.a_codes, problem.a_scaling);
    }
    line << " -> " << text(problem.result_dtype);
    if (plan.beta != 0) line << " beta=" << plan.beta;
    if (problem.a_codes == Codes::E2M1 && problem.factors_on_device) line << " factors";
    if (problem.fast_sums) line << " fast";
    found.push_back(line.str());
  }
  return found;
}

TORCH_LIBRARY(transformer_ops_emulated, library) {
  library.def("products() -> str[]", products);
  library.def("set_multiplies_codes(bool value) -> ()", set_multiplies_codes);
  library.def("set_multiplies_blocks(bool value) -> ()", set_multiplies_blocks);
  library.def("set_multiplies_mx(bool value) -> ()", set_multiplies_mx);
  library.def("set_multiplies_nvfp4(bool value) -> ()", set_multiplies_nvfp4);
  library.def("set_multiplies_groups(bool value) -> ()", set_multiplies_groups);
}

[[maybe_unused]] const bool installed = [] {
  static const Backend backend = {c10::DeviceType::CPU, kernel::rows_of_this_library(),
                                  [](c10::Device) -> Stream { return nullptr; }, draw};
  set_backend(&backend);
  register_cuda_bodies(c10::DispatchKey::CPU);
  return true;
}();

}  // namespace
}  // namespace transformer_ops::cuda
