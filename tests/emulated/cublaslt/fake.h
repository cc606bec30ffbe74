// A cuBLASLt that computes on the CPU what its descriptors say (fake.cpp), and records its calls,
// so that gemm.cpp is tested without a GPU.
#pragma once

#include <cublasLt.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

namespace transformer_ops::cuda {

struct FakeCublasLt {
  // ---- its behaviour
  int device = 0;
  int capability = 75;  // of all devices, as major * 10 + minor
  size_t version = 130000;
  uint64_t workspace_bytes = 0;  // that its algorithm needs
  cublasStatus_t answer = CUBLAS_STATUS_SUCCESS;
  int answers = 1;  // that the heuristics find
  cublasStatus_t outcome = CUBLAS_STATUS_SUCCESS;

  // ---- its recorded calls
  int handles = 0, questions = 0, products = 0;
  std::atomic<int> descriptors = 0;  // of products and preferences, alive
  std::map<cublasLtMatmulPreferenceAttributes_t, uint64_t> preference = {};
  uint64_t compute_type = 0;
  bool fast_sums = false;
  int cleared = 0;                            // errors that CUDA's runtime remembers
  std::atomic<bool> asked_unrelaxed = false;  // a call in a mode in which it would have failed in a
                                              // capture
  static inline thread_local bool relaxed = false;  // this thread's current mode of captures
  const void* workspace = nullptr;
  std::mutex mutex = {};
};

FakeCublasLt& fake();

}  // namespace transformer_ops::cuda
