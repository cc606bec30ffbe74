// Products with cuBLASLt. A query of its heuristics takes some 100 microseconds, so the answers are
// cached. A call makes a descriptor and queues the product. It neither waits nor allocates on the
// device, except through the caller's `allocate`, and it may be captured.
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "kernels/cuda/gemm_plan.h"

namespace transformer_ops::cuda {
namespace {

static_assert(static_cast<int>(LtEpilogue::Default) == CUBLASLT_EPILOGUE_DEFAULT);
static_assert(static_cast<int>(LtEpilogue::Bias) == CUBLASLT_EPILOGUE_BIAS);
static_assert(static_cast<int>(LtEpilogue::GeluBias) == CUBLASLT_EPILOGUE_GELU_BIAS);
static_assert(static_cast<int>(LtEpilogue::GeluAuxBias) == CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
static_assert(static_cast<int>(LtEpilogue::BgradB) == CUBLASLT_EPILOGUE_BGRADB);

#if CUBLAS_VERSION >= 120900
#define TRANSFORMER_OPS_HAS_BLOCKS 1
#else
#define TRANSFORMER_OPS_HAS_BLOCKS 0
#endif

// NVIDIA recommends this for Hopper and later (cuBLAS documentation, "cuBLAS workspace").
constexpr uint64_t kMostWorkspaceBytes = uint64_t{32} << 20;
// This is far more than the shapes of a model. A program whose shapes keep changing starts over.
constexpr size_t kMostProblems = 4096;

void check(cublasStatus_t status, const char* rule) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string("[gemm] cuBLASLt must ") + rule + ", got " +
                           cublasLtGetStatusName(status));
}

void check(cudaError_t error, const char* rule) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("[gemm] CUDA must ") + rule + ", got " +
                           cudaGetErrorName(error));
}

cudaDataType_t data_type(Codes codes) {
#if TRANSFORMER_OPS_HAS_BLOCKS
  if (codes == Codes::E2M1) return CUDA_R_4F_E2M1;
#endif
  return codes == Codes::E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

cudaDataType_t data_type(DType dtype, Codes codes = Codes::None) {
  if (codes != Codes::None) return data_type(codes);
  switch (dtype) {
    case DType::Float16:
      return CUDA_R_16F;
    case DType::BFloat16:
      return CUDA_R_16BF;
    case DType::Float64:
      return CUDA_R_64F;
    case DType::Float32:
      break;
  }
  return CUDA_R_32F;
}

// ---- descriptors. The library creates them: those of cuBLAS 13.4 are longer than those of 13.1,
// and a program may run with a later cuBLAS than it was compiled with.

template <auto destroy>
struct Destroy {
  template <class Opaque>
  void operator()(Opaque* opaque) const {
    destroy(opaque);
  }
};

template <class Opaque, auto destroy>
using Descriptor = std::unique_ptr<Opaque, Destroy<destroy>>;

class Operation {
 public:
  explicit Operation(const GemmPlan& plan) {
    const LtProblem& problem = plan.problem;
    const auto compute = problem.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasLtMatmulDesc_t made = nullptr;
    check(cublasLtMatmulDescCreate(&made, compute, CUDA_R_32F), "describe a product");
    descriptor_.reset(made);
    if (problem.transpose_a) set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    if (problem.transpose_b) set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_T);
    if (problem.factors_on_device) {
      set(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    }
    if (plan.a_scale != nullptr) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, plan.a_scale);
    if (plan.b_scale != nullptr) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, plan.b_scale);
    set_scaling(problem);
    if (problem.fast_sums) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
    if (problem.epilogue == LtEpilogue::Default) return;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, problem.epilogue);
    if (plan.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, plan.bias);
    if (plan.aux == nullptr) return;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, plan.aux);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, problem.aux_ld);
  }

  cublasLtMatmulDesc_t get() const { return descriptor_.get(); }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublasLtMatmulDescSetAttribute(get(), attribute, &value, sizeof(value)),
          "describe a product");
  }

  void set_scaling([[maybe_unused]] const LtProblem& problem) {
#if TRANSFORMER_OPS_HAS_BLOCKS
    if (!has_blocks(problem)) return;
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode(problem.a_scaling));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode(problem.b_scaling));
#endif
  }

#if TRANSFORMER_OPS_HAS_BLOCKS
  static int32_t mode(Scaling scaling) {
    switch (scaling) {
      case Scaling::Vectors128:
        return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
      case Scaling::Blocks128:
        return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
      case Scaling::Vectors32:
        return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
      case Scaling::Vectors16:
        return CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
      case Scaling::Matrix:
        break;
    }
    return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
#endif

  Descriptor<cublasLtMatmulDescOpaque_t, cublasLtMatmulDescDestroy> descriptor_;
};

class MatrixLayout {
 public:
  MatrixLayout(cudaDataType_t type, const Layout& layout) {
    cublasLtMatrixLayout_t made = nullptr;
    check(cublasLtMatrixLayoutCreate(&made, type, static_cast<uint64_t>(layout.rows),
                                     static_cast<uint64_t>(layout.cols), layout.ld),
          "describe a matrix");
    descriptor_.reset(made);
  }

  cublasLtMatrixLayout_t get() const { return descriptor_.get(); }

 private:
  Descriptor<cublasLtMatrixLayoutOpaque_t, cublasLtMatrixLayoutDestroy> descriptor_;
};

struct Layouts {
  explicit Layouts(const LtProblem& problem)
      : a(data_type(problem.dtype, problem.a_codes), problem.a),
        b(data_type(problem.dtype, problem.b_codes), problem.b),
        c(data_type(problem.result_dtype), problem.c),
        d(data_type(problem.result_dtype), problem.d) {}

  MatrixLayout a, b, c, d;
};

class Preference {
 public:
  explicit Preference(const LtProblem& problem) {
    cublasLtMatmulPreference_t made = nullptr;
    check(cublasLtMatmulPreferenceCreate(&made), "take a preference");
    descriptor_.reset(made);
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMostWorkspaceBytes);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes(problem.partial_sums));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t{problem.alignment[0]});
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t{problem.alignment[1]});
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t{problem.alignment[2]});
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t{problem.alignment[3]});
  }

  cublasLtMatmulPreference_t get() const { return descriptor_.get(); }

 private:
  // In-place schemes are excluded: cublasLt.h promises that their additions come one after another,
  // but not in which order.
  static uint32_t schemes(PartialSums sums) {
    switch (sums) {
      case PartialSums::AnyPrecision:
        return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
      case PartialSums::FullPrecision:
        return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
      case PartialSums::None:
        break;
    }
    return CUBLASLT_REDUCTION_SCHEME_NONE;
  }

  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    check(cublasLtMatmulPreferenceSetAttribute(get(), attribute, &value, sizeof(value)),
          "take a preference");
  }

  Descriptor<cublasLtMatmulPreferenceOpaque_t, cublasLtMatmulPreferenceDestroy> descriptor_;
};

// ---- the answers of the heuristics, by device

struct Answer {
  Answer(cublasLtHandle_t handle, const GemmPlan& plan);

  const Layouts layouts;
  bool supported;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace_bytes;
};

Answer::Answer(cublasLtHandle_t handle, const GemmPlan& plan) : layouts(plan.problem) {
  const Operation operation(plan);
  const Preference preference(plan.problem);
  cublasLtMatmulHeuristicResult_t result = {};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, operation.get(), layouts.a.get(), layouts.b.get(), layouts.c.get(), layouts.d.get(),
      preference.get(), 1, &result, &count);
  // INVALID_VALUE also means a combination of dtypes, epilogue and layouts that cuBLASLt does not
  // have.
  if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) {
    check(status, "choose an algorithm");
  }
  supported =
      status == CUBLAS_STATUS_SUCCESS && count == 1 && result.state == CUBLAS_STATUS_SUCCESS;
  algorithm = result.algo;
  workspace_bytes = result.workspaceSize;
}

struct Device {
  cublasLtHandle_t handle = nullptr;
  std::unordered_map<LtProblem, std::shared_ptr<const Answer>, LtProblemHash> answers = {};
};

// A first call may be during a capture, which does not allow the thread to allocate on the device
// or to load kernels.
class AllowedInCapture {
 public:
  AllowedInCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "change a mode"); }
  ~AllowedInCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowedInCapture(const AllowedInCapture&) = delete;
  AllowedInCapture& operator=(const AllowedInCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct Prepared {
  cublasLtHandle_t handle;
  std::shared_ptr<const Answer> answer;
};

Prepared prepare(const GemmPlan& plan) {
  // They are never deleted, because tensors may be computed while static objects are destroyed.
  static auto* const mutex = new std::mutex;
  static auto* const devices = new std::map<int, Device>;
  int index = 0;
  check(cudaGetDevice(&index), "have a current device");
  const std::lock_guard lock(*mutex);
  Device& device = (*devices)[index];
  if (const auto found = device.answers.find(plan.problem); found != device.answers.end()) {
    return {device.handle, found->second};
  }
  const AllowedInCapture allowed;
  if (device.handle == nullptr) check(cublasLtCreate(&device.handle), "start");
  if (device.answers.size() >= kMostProblems) device.answers.clear();
  const auto answer = std::make_shared<const Answer>(device.handle, plan);
  device.answers.emplace(plan.problem, answer);
  return {device.handle, answer};
}

// The compute capability of the current device, as major * 10 + minor.
int capability() {
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device), "have a current device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "know a device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "know a device");
  return major * 10 + minor;
}

// Block scales were added in 12.9. The library at run time may be older than the headers.
bool knows_blocks() { return TRANSFORMER_OPS_HAS_BLOCKS && cublasLtGetVersion() >= 120900; }

bool can_multiply(const LtProblem& problem) {
  if (problem.a_codes == Codes::None) return true;
  if (problem.a_scaling == Scaling::Vectors16) return entry::multiplies_nvfp4();
  if (problem.a_scaling == Scaling::Vectors32) return entry::multiplies_mx();
  return has_blocks(problem) ? entry::multiplies_blocks() : entry::multiplies_codes();
}

}  // namespace

// 8.9 is the first compute capability with FP8 products (cuBLAS documentation, "cublasLtMatmul").
bool entry::multiplies_codes() { return capability() >= 89; }

bool entry::multiplies_blocks() { return knows_blocks() && capability() == 90; }

bool entry::multiplies_mx() { return knows_blocks() && capability() >= 100; }

bool entry::multiplies_nvfp4() { return knows_blocks() && capability() >= 100; }

// torch has kernels for 9.0 and 10.0 (aten/src/ATen/native/cuda/GroupedBlas.cpp); elsewhere it
// waits for the sizes.
bool entry::multiplies_groups() { return capability() / 10 == 9 || capability() / 10 == 10; }

bool entry::gemm(Stream stream, const Gemm& gemm) {
  const auto plan = plan_gemm(gemm);
  if (!plan || !can_multiply(plan->problem)) return false;
  const auto [handle, answer] = prepare(*plan);
  const size_t bytes = answer->workspace_bytes;
  if (!answer->supported || (bytes > 0 && gemm.allocate == nullptr)) return false;
  void* const workspace = bytes > 0 ? gemm.allocate(gemm.owner, bytes) : nullptr;
  const Operation operation(*plan);
  const Layouts& layouts = answer->layouts;
  const float on_host[] = {static_cast<float>(plan->alpha), static_cast<float>(plan->beta)};
  const float* const factors = plan->factors != nullptr ? plan->factors : on_host;
  const AllowedInCapture allowed;
  const cublasStatus_t status = cublasLtMatmul(
      handle, operation.get(), factors, plan->a, layouts.a.get(), plan->b, layouts.b.get(),
      factors + 1, plan->c, layouts.c.get(), plan->d, layouts.d.get(), &answer->algorithm,
      workspace, bytes, static_cast<cudaStream_t>(stream));
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
  check(status, "run a product");
  return true;
}

TRANSFORMER_OPS_KERNEL(multiplies_codes, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_blocks, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_mx, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_nvfp4, "cuda");
TRANSFORMER_OPS_KERNEL(multiplies_groups, "cuda");
TRANSFORMER_OPS_KERNEL(gemm, "cuda");

}  // namespace transformer_ops::cuda
