// The products of products.h by cuBLASLt, on the GPU at hand: benchmarks/gpu_check.sh builds and
// runs it. Prints a line a product; exits with 1 where a number that ops rely on is wrong.
//
// "none" is a product that cuBLASLt does not have; the ops then use another way.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <map>
#include <stdexcept>

#include "products.h"

namespace transformer_ops::cuda {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (void* block : blocks_) cudaFree(block);
  }

  void* allocate(size_t bytes) {
    void* block = nullptr;
    check(cudaMalloc(&block, bytes));
    blocks_.push_back(block);
    return block;
  }
  Memory get() {
    return {
        .allocate = [this](size_t bytes) { return allocate(bytes); },
        .upload = [](void* to, const void* from,
                     size_t bytes) { check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice)); },
        .download =
            [](void* to, const void* from, size_t bytes) {
              check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
            },
        // tanh.approx.f32 has a relative error of 2^-10.987 (PTX ISA, "tanh").
        .gelu_error = 0x1p-10};
  }

 private:
  std::vector<void*> blocks_;
};

int main() {
  std::map<Outcome, int> counts;
  bool failed = false;
  for (const Product& product : products()) {
    DeviceMemory blocks;
    const Memory memory = blocks.get();
    std::string text;
    const Outcome outcome = check_product(product, memory, text);
    ++counts[outcome];
    failed = failed || outcome == Outcome::Wrong;
    const char* const said = outcome == Outcome::Right   ? "right"
                             : outcome == Outcome::Wrong ? "WRONG"
                                                         : "none";
    std::printf("%-28s %s %s\n", product.name.c_str(), said, text.c_str());
  }
  std::printf("%d right, %d wrong, %d without an algorithm\n", counts[Outcome::Right],
              counts[Outcome::Wrong], counts[Outcome::Unsupported]);
  // If nothing ran, nothing is proven.
  return failed || counts[Outcome::Right] == 0 ? 1 : 0;
}

}  // namespace
}  // namespace transformer_ops::cuda

int main() {
  try {
    return transformer_ops::cuda::main();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[check_products] must run to its end, got %s\n", error.what());
    return 2;
  }
}
