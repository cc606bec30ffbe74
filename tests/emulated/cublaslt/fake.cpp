#include "fake.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <optional>

#include "interpret.h"

namespace transformer_ops::cuda {

FakeCublasLt& fake() {
  static FakeCublasLt fake;
  return fake;
}

namespace {

// Opaque structures store attributes by number, and here also how they were made.
constexpr int kCompute = 0, kScale = 1, kMade = 31;
// The numbers of attributes beyond the end of the structure are mapped to unused ones.
constexpr int kAScaling = 29, kBScaling = 30;

int place_of(cublasLtMatmulDescAttributes_t attribute) {
  if (attribute == CUBLASLT_MATMUL_DESC_A_SCALE_MODE) return kAScaling;
  return attribute == CUBLASLT_MATMUL_DESC_B_SCALE_MODE ? kBScaling : attribute;
}
constexpr uint64_t kMark = 0x6d61646520736f21;

// The sizes in cublasLt.h; 0 for attributes that gemm.cpp does not need.
size_t size_of_attribute(cublasLtMatmulDescAttributes_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
    case CUBLASLT_MATMUL_DESC_TRANSB:
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE:
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE:
      return 4;
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
      return 1;
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return 8;
    default:
      return 0;
  }
}

size_t size_of_attribute(cublasLtMatmulPreferenceAttributes_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return 8;
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return 4;
    default:
      return 0;
  }
}

DType dtype_of(uint64_t type) {
  if (type == CUDA_R_16F) return DType::Float16;
  return type == CUDA_R_16BF ? DType::BFloat16 : DType::Float32;
}

Codes codes_of(uint64_t type) {
  if (type == CUDA_R_4F_E2M1) return Codes::E2M1;
  if (type == CUDA_R_8F_E4M3) return Codes::E4M3;
  return type == CUDA_R_8F_E5M2 ? Codes::E5M2 : Codes::None;
}

std::optional<Scaling> scaling_of(uint64_t mode) {
  switch (mode) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F:
      return Scaling::Matrix;
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
      return Scaling::Vectors128;
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
      return Scaling::Blocks128;
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0:
      return Scaling::Vectors32;
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3:
      return Scaling::Vectors16;
    default:
      return std::nullopt;
  }
}

// The rules of the cuBLAS documentation, "128-element 1D and 128x128 2D Block Scaling For FP8 Data
// Types". torch has another one: fast sums are not allowed.
bool takes_scales(const cublasLtMatmulDescOpaque_t& desc, const Layout& a, const Layout& b) {
  const auto a_scaling = scaling_of(desc.data[kAScaling]);
  const auto b_scaling = scaling_of(desc.data[kBScaling]);
  if (!a_scaling || !b_scaling) return false;
  if (a_scaling == Scaling::Matrix && b_scaling == Scaling::Matrix) return true;
  if (a_scaling == Scaling::Matrix || b_scaling == Scaling::Matrix) return false;
  if (a_scaling == Scaling::Blocks128 && b_scaling == Scaling::Blocks128) return false;
  for (const Scaling of_bytes : {Scaling::Vectors32, Scaling::Vectors16}) {
    if ((a_scaling == of_bytes) != (b_scaling == of_bytes)) return false;
  }
  for (const auto attribute :
       {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER}) {
    if (desc.data[attribute] == 0 || desc.data[attribute] % 16 != 0) return false;
  }
  // Rows of FP4 are whole bytes, and have whole blocks.
  if (a_scaling == Scaling::Vectors16 && (a.rows % 16 != 0 || a.ld % 32 != 0 || b.ld % 32 != 0)) {
    return false;
  }
  // Codes have one layout, whose columns are M and N. FP4 allows any number of rows.
  if (a_scaling == Scaling::Vectors16) return desc.data[CUBLASLT_MATMUL_DESC_FAST_ACCUM] == 0;
  return a.cols % 4 == 0 && b.cols % 4 == 0 && desc.data[CUBLASLT_MATMUL_DESC_FAST_ACCUM] == 0;
}

Layout layout_of(const cublasLtMatrixLayoutOpaque_t& matrix) {
  const auto at = [&matrix](int i) { return static_cast<int64_t>(matrix.data[i]); };
  return {at(1), at(2), at(3)};
}

void needs_relaxed_mode() {
  if (!fake().relaxed) fake().asked_unrelaxed = true;
}

const void* pointer(uint64_t bits) { return reinterpret_cast<const void*>(bits); }

}  // namespace
}  // namespace transformer_ops::cuda

using transformer_ops::cuda::Codes;
using transformer_ops::cuda::codes_of;
using transformer_ops::cuda::dtype_of;
using transformer_ops::cuda::fake;
using transformer_ops::cuda::kAScaling;
using transformer_ops::cuda::kBScaling;
using transformer_ops::cuda::kCompute;
using transformer_ops::cuda::kMade;
using transformer_ops::cuda::kMark;
using transformer_ops::cuda::kScale;
using transformer_ops::cuda::layout_of;
using transformer_ops::cuda::needs_relaxed_mode;
using transformer_ops::cuda::place_of;
using transformer_ops::cuda::pointer;
using transformer_ops::cuda::Scaling;
using transformer_ops::cuda::scaling_of;
using transformer_ops::cuda::size_of_attribute;
using transformer_ops::cuda::takes_scales;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = fake().device;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  ++fake().cleared;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const bool before = fake().relaxed;
  fake().relaxed = *mode == cudaStreamCaptureModeRelaxed;
  *mode = before ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? fake().capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? fake().capability % 10
                                                            : 0;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 12040;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }

const char* cublasLtGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_EXECUTION_FAILED ? "CUBLAS_STATUS_EXECUTION_FAILED" : "another";
}

size_t cublasLtGetVersion() { return fake().version; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  needs_relaxed_mode();
  *handle = reinterpret_cast<cublasLtHandle_t>(static_cast<uintptr_t>(++fake().handles));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  auto* const desc = new cublasLtMatmulDescOpaque_t{};
  desc->data[kCompute] = compute;
  desc->data[kScale] = scale;
  desc->data[CUBLASLT_MATMUL_DESC_EPILOGUE] = CUBLASLT_EPILOGUE_DEFAULT;
  desc->data[kMade] = kMark;
  *made = desc;
  ++fake().descriptors;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete desc;
  --fake().descriptors;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  if (desc->data[kMade] != kMark || size != size_of_attribute(attribute)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  uint64_t& place = desc->data[place_of(attribute)];
  place = 0;
  std::memcpy(&place, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  *made = new cublasLtMatrixLayoutOpaque_t{
      {static_cast<uint64_t>(type), rows, cols, static_cast<uint64_t>(ld)}};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  fake().preference.clear();
  *made = new cublasLtMatmulPreferenceOpaque_t{};
  ++fake().descriptors;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  --fake().descriptors;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t size) {
  if (size != size_of_attribute(attribute)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&fake().preference[attribute], value, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* found) {
  needs_relaxed_mode();
  ++fake().questions;
  if (handle == nullptr || desc->data[kMade] != kMark || wanted < 1) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const auto scaling = scaling_of(desc->data[kAScaling]);
  const bool is_mx = scaling == Scaling::Vectors32 || scaling == Scaling::Vectors16;
  if (scaling != Scaling::Matrix && (is_mx ? fake().capability < 100 : fake().capability != 90)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  *found = fake().answers;
  results[0].algo.data[0] = kMark;
  results[0].workspaceSize = fake().workspace_bytes;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  return fake().answer;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t) {
  const std::lock_guard lock(fake().mutex);
  needs_relaxed_mode();  // it may load the algorithm's kernel
  ++fake().products;
  fake().workspace = workspace;
  fake().compute_type = desc->data[kCompute];
  fake().fast_sums = desc->data[CUBLASLT_MATMUL_DESC_FAST_ACCUM] != 0;
  if (fake().outcome != CUBLAS_STATUS_SUCCESS) return fake().outcome;
  const Codes a_codes = codes_of(a_layout->data[0]), b_codes = codes_of(b_layout->data[0]);
  // Codes have only one layout.
  if (a_codes != Codes::None && (desc->data[CUBLASLT_MATMUL_DESC_TRANSA] != CUBLAS_OP_T ||
                                 desc->data[CUBLASLT_MATMUL_DESC_TRANSB] != CUBLAS_OP_N)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!takes_scales(*desc, layout_of(*a_layout), layout_of(*b_layout))) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  // FP4 has scales for 16 numbers, and no other type has.
  for (const auto& [codes, mode] :
       {std::pair(a_codes, desc->data[kAScaling]), std::pair(b_codes, desc->data[kBScaling])}) {
    if ((codes == Codes::E2M1) != (scaling_of(mode) == Scaling::Vectors16)) {
      return CUBLAS_STATUS_INVALID_VALUE;
    }
  }
  if (handle == nullptr || algo->data[0] != kMark || desc->data[kScale] != CUDA_R_32F ||
      workspace_bytes < fake().workspace_bytes ||
      (workspace == nullptr) != (workspace_bytes == 0) ||
      (a_codes == Codes::None) != (b_codes == Codes::None) ||
      (a_codes == Codes::None && a_layout->data[0] != b_layout->data[0]) ||
      c_layout->data[0] != d_layout->data[0]) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  // This is the only way to tell where the factors are.
  const bool on_device =
      desc->data[CUBLASLT_MATMUL_DESC_POINTER_MODE] == CUBLASLT_POINTER_MODE_DEVICE;
  if (on_device && beta != static_cast<const float*>(alpha) + 1) return CUBLAS_STATUS_INVALID_VALUE;
  transformer_ops::cuda::interpret(
      {.problem = {.dtype = dtype_of(a_layout->data[0]),
                   .result_dtype = dtype_of(d_layout->data[0]),
                   .a_codes = a_codes,
                   .b_codes = b_codes,
                   .a_scaling = *scaling_of(desc->data[kAScaling]),
                   .b_scaling = *scaling_of(desc->data[kBScaling]),
                   .tf32 = desc->data[kCompute] == CUBLAS_COMPUTE_32F_FAST_TF32,
                   .fast_sums = fake().fast_sums,
                   .partial_sums = {},
                   .epilogue = static_cast<transformer_ops::cuda::LtEpilogue>(
                       desc->data[CUBLASLT_MATMUL_DESC_EPILOGUE]),
                   .transpose_a = desc->data[CUBLASLT_MATMUL_DESC_TRANSA] == CUBLAS_OP_T,
                   .transpose_b = desc->data[CUBLASLT_MATMUL_DESC_TRANSB] == CUBLAS_OP_T,
                   .a = layout_of(*a_layout),
                   .b = layout_of(*b_layout),
                   .c = layout_of(*c_layout),
                   .d = layout_of(*d_layout),
                   .aux_ld = static_cast<int64_t>(desc->data[CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD]),
                   .factors_on_device = on_device,
                   .alignment = {}},
       .a = a,
       .b = b,
       .c = c,
       .d = d,
       .bias = pointer(desc->data[CUBLASLT_MATMUL_DESC_BIAS_POINTER]),
       .aux = pointer(desc->data[CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER]),
       .a_scale = pointer(desc->data[CUBLASLT_MATMUL_DESC_A_SCALE_POINTER]),
       .b_scale = pointer(desc->data[CUBLASLT_MATMUL_DESC_B_SCALE_POINTER]),
       .alpha = *static_cast<const float*>(alpha),
       .beta = *static_cast<const float*>(beta),
       .factors = on_device ? static_cast<const float*>(alpha) : nullptr});
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
