// The calls that gemm.cpp makes of cuBLASLt, answered by fake.cpp.
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include "fake.h"
#include "host_memory.h"

namespace transformer_ops::cuda {
namespace {

alignas(256) char memory[4096];

class CublasLt : public testing::Test {
 protected:
  void SetUp() override {
    // Answers are kept for the life of the process: each test has a device of its own.
    static int device = 0;
    fake().device = ++device;
    fake().answer = fake().outcome = CUBLAS_STATUS_SUCCESS;
    fake().answers = 1;
    fake().workspace_bytes = 0;
    fake().capability = 90;
    fake().questions = fake().products = 0;
    fake().relaxed = false;
    fake().asked_unrelaxed = false;
  }

  void TearDown() override {
    EXPECT_EQ(fake().descriptors, 0);
    fake().capability = 75;
  }

  // Small enough for `memory`.
  static Gemm example() {
    return {.m = 4,
            .n = 8,
            .k = 16,
            .dtype = DType::BFloat16,
            .result_dtype = DType::BFloat16,
            .a = {memory, 16},
            .b = {memory + 512, 8},
            .d = memory + 1024,
            .d_stride = 8};
  }

  static uint64_t preferred(cublasLtMatmulPreferenceAttributes_t attribute) {
    return fake().preference.at(attribute);
  }
};

TEST_F(CublasLt, DescriptorsSayWhatIsComputed) {
  for (const Product& product : products()) {
    // No GPU has both.
    const bool is_later =
        product.a_scaling == Scaling::Vectors32 || product.a_scaling == Scaling::Vectors16;
    fake().capability = is_later ? 100 : 90;
    fake().device = 5000 + fake().capability;
    HostMemory blocks;
    const Memory memory = blocks.get();
    std::string text;
    EXPECT_EQ(check_product(product, memory, text), Outcome::Right) << product.name << ": " << text;
    EXPECT_EQ(fake().compute_type, static_cast<uint64_t>(product.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                      : CUBLAS_COMPUTE_32F));
    EXPECT_EQ(fake().fast_sums, product.fast_sums) << product.name;
  }
}

TEST_F(CublasLt, MultipliesCodesFromComputeCapability89On) {
  for (const auto& [capability, wanted] :
       {std::pair(80, false), {86, false}, {89, true}, {90, true}, {120, true}}) {
    fake().device = 2000 + capability;
    fake().capability = capability;
    EXPECT_EQ(entry::multiplies_codes(), wanted) << capability;
    Gemm call = example();
    call.n = 16;
    call.a = {memory, 16, false, Codes::E4M3};
    call.b = {memory + 512, 16, true, Codes::E4M3};
    call.d_stride = 16;
    EXPECT_EQ(entry::gemm(nullptr, call), wanted) << capability;
    EXPECT_TRUE(entry::gemm(nullptr, example()));
  }
}

TEST_F(CublasLt, MultipliesBlocksOnComputeCapability90Alone) {
  alignas(256) static char codes[16 * 128];
  for (const auto& [capability, wanted] :
       {std::pair(80, false), {89, false}, {90, true}, {100, false}, {120, false}}) {
    fake().device = 3000 + capability;
    fake().capability = capability;
    EXPECT_EQ(entry::multiplies_blocks(), wanted) << capability;
    Gemm call = example();
    call.n = 16;
    call.k = 128;
    const auto* const scales = reinterpret_cast<const float*>(memory + 2048);
    call.a = {codes, 128, false, Codes::E4M3, scales, Scaling::Vectors128};
    call.b = {codes, 128, true, Codes::E4M3, scales, Scaling::Blocks128};
    call.d_stride = 16;
    EXPECT_EQ(entry::gemm(nullptr, call), wanted) << capability;
    call.a.scaling = call.b.scaling = Scaling::Matrix;
    EXPECT_EQ(entry::gemm(nullptr, call), capability >= 89) << capability;
  }
}

TEST_F(CublasLt, MultipliesMxFromComputeCapability100On) {
  alignas(256) static char codes[32 * 128], result[32 * 32 * 2];
  for (const auto& [capability, wanted] :
       {std::pair(89, false), {90, false}, {100, true}, {120, true}}) {
    fake().device = 4000 + capability;
    fake().capability = capability;
    EXPECT_EQ(entry::multiplies_mx(), wanted) << capability;
    EXPECT_EQ(entry::multiplies_nvfp4(), wanted) << capability;
    EXPECT_EQ(entry::multiplies_groups(), capability == 90 || capability == 100) << capability;
    Gemm call = example();
    call.m = call.n = call.d_stride = 32;
    call.k = 128;
    call.a = {codes, 128, false, Codes::E4M3, memory + 2048, Scaling::Vectors32};
    call.b = {codes, 128, true, Codes::E4M3, memory + 2048, Scaling::Vectors32};
    call.d = result;
    EXPECT_EQ(entry::gemm(nullptr, call), wanted) << capability;
    call.a.codes = call.b.codes = Codes::E2M1;
    call.a.scaling = call.b.scaling = Scaling::Vectors16;
    EXPECT_EQ(entry::gemm(nullptr, call), wanted) << capability;
  }
}

// One that is older than the headers that this was compiled with.
TEST_F(CublasLt, AnOldLibraryKnowsNoBlocks) {
  for (const auto& [version, wanted] : {std::pair(120803, false), {120900, true}}) {
    fake().version = version;
    fake().capability = 90;
    EXPECT_EQ(entry::multiplies_blocks(), wanted) << version;
    EXPECT_TRUE(entry::multiplies_codes());
    fake().capability = 100;
    EXPECT_EQ(entry::multiplies_mx(), wanted) << version;
    EXPECT_EQ(entry::multiplies_nvfp4(), wanted) << version;
  }
  fake().version = 130000;
}

TEST_F(CublasLt, IsAskedOnceForEachProblemAndDevice) {
  Gemm call = example();
  const int handles = fake().handles;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(entry::gemm(nullptr, call));
  call.alpha = 2;
  call.d = memory + 2048;
  EXPECT_TRUE(entry::gemm(nullptr, call));
  EXPECT_EQ(fake().questions, 1);
  EXPECT_EQ(fake().handles, handles + 1);
  call.m = 3;
  EXPECT_TRUE(entry::gemm(nullptr, call));
  EXPECT_EQ(fake().questions, 2);
  const int device = std::exchange(fake().device, 1000);
  EXPECT_TRUE(entry::gemm(nullptr, call));
  EXPECT_EQ(fake().questions, 3);
  EXPECT_EQ(fake().handles, handles + 2);
  fake().device = device;
  EXPECT_TRUE(entry::gemm(nullptr, call));
  EXPECT_EQ(fake().questions, 3);
  EXPECT_EQ(fake().products, 7);
}

TEST_F(CublasLt, AnswersThatAreKeptAreBounded) {
  Gemm call = example();
  call.m = call.n = call.k = call.b.stride = call.d_stride = 1;
  // More than are kept. The second time none is there any more, but for the last.
  for (int pass = 0; pass < 2; ++pass) {
    for (call.a.stride = 1; call.a.stride < 5000; ++call.a.stride) {
      EXPECT_TRUE(entry::gemm(nullptr, call));
    }
  }
  EXPECT_EQ(fake().questions, 2 * 4999);
  --call.a.stride;
  EXPECT_TRUE(entry::gemm(nullptr, call));
  EXPECT_EQ(fake().questions, 2 * 4999);
}

TEST_F(CublasLt, PreferencesFollowSettingsAndAddresses) {
  Gemm call = example();
  call.a.data = memory + 2;
  call.b.data = memory + 512 + 16;
  call.c = memory + 1024 + 64;
  call.c_stride = 8;
  call.beta = 1;
  call.d = memory + 2048 + 8;
  const std::pair<PartialSums, uint64_t> schemes[] = {
      {PartialSums::AnyPrecision, 6}, {PartialSums::FullPrecision, 2}, {PartialSums::None, 0}};
  for (const auto& [setting, scheme] : schemes) {
    call.partial_sums = setting;
    EXPECT_TRUE(entry::gemm(nullptr, call));
    EXPECT_EQ(preferred(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK), scheme);
  }
  EXPECT_EQ(fake().questions, 3);
  EXPECT_EQ(preferred(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES), 32u << 20);
  // cuBLASLt's A is the row-major B.
  EXPECT_EQ(preferred(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES), 16u);
  EXPECT_EQ(preferred(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES), 2u);
  EXPECT_EQ(preferred(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES), 64u);
  EXPECT_EQ(preferred(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES), 8u);
}

TEST_F(CublasLt, TakesTheWorkspaceThatItsAlgorithmNeeds) {
  Gemm call = example();
  static uint64_t asked = 0;
  call.allocate = [](void* owner, uint64_t bytes) {
    asked = bytes;
    return owner;
  };
  call.owner = memory + 3072;
  asked = 0;
  EXPECT_TRUE(entry::gemm(nullptr, call));
  EXPECT_EQ(asked, 0u);
  EXPECT_EQ(fake().workspace, nullptr);
  fake().workspace_bytes = 640;
  call.m = 3;
  EXPECT_TRUE(entry::gemm(nullptr, call));
  EXPECT_EQ(asked, 640u);
  EXPECT_EQ(fake().workspace, memory + 3072);
  // What allocates may fail, and then nothing is queued.
  const int products = fake().products;
  call.allocate = [](void*, uint64_t) -> void* { throw std::length_error("out of memory"); };
  EXPECT_THROW(entry::gemm(nullptr, call), std::length_error);
  call.allocate = nullptr;
  EXPECT_FALSE(entry::gemm(nullptr, call));
  EXPECT_EQ(fake().products, products);
}

TEST_F(CublasLt, FirstCallsMayBeInACapture) {
  EXPECT_TRUE(entry::gemm(nullptr, example()));
  EXPECT_FALSE(fake().asked_unrelaxed);
  EXPECT_FALSE(fake().relaxed);
}

TEST_F(CublasLt, SaysWhereItHasNoAlgorithmAndIsNotAskedAgain) {
  Gemm call = example();
  const auto unsupported = [&call] {
    const int questions = fake().questions;
    EXPECT_FALSE(entry::gemm(nullptr, call));
    EXPECT_FALSE(entry::gemm(nullptr, call));
    EXPECT_EQ(fake().questions, questions + 1);
    EXPECT_EQ(fake().products, 0);
    ++call.m;
  };
  fake().answers = 0;
  unsupported();
  fake().answers = 1;
  fake().answer = CUBLAS_STATUS_NOT_SUPPORTED;
  unsupported();
  fake().answer = CUBLAS_STATUS_INVALID_VALUE;
  unsupported();
  fake().answer = CUBLAS_STATUS_SUCCESS;
  EXPECT_TRUE(entry::gemm(nullptr, call));
  fake().outcome = CUBLAS_STATUS_NOT_SUPPORTED;
  EXPECT_FALSE(entry::gemm(nullptr, call));
}

std::string error_of(const Gemm& call) {
  try {
    entry::gemm(nullptr, call);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "none";
}

TEST_F(CublasLt, ErrorsNameTheStatusAndLeaveNothingBehind) {
  fake().outcome = CUBLAS_STATUS_EXECUTION_FAILED;
  EXPECT_EQ(error_of(example()),
            "[gemm] cuBLASLt must run a product, got CUBLAS_STATUS_EXECUTION_FAILED");
  Gemm other = example();
  other.m = 2;
  fake().answer = CUBLAS_STATUS_EXECUTION_FAILED;
  EXPECT_EQ(error_of(other),
            "[gemm] cuBLASLt must choose an algorithm, got CUBLAS_STATUS_EXECUTION_FAILED");
  EXPECT_FALSE(fake().relaxed);
  fake().answer = fake().outcome = CUBLAS_STATUS_SUCCESS;
  EXPECT_TRUE(entry::gemm(nullptr, other));
}

TEST_F(CublasLt, ThreadsShareWhatWasAnswered) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([i] {
      for (int k = 0; k < 100; ++k) {
        Gemm call = example();
        call.m = 1 + k % 4;
        call.d = memory + 1024 + 256 * i;
        EXPECT_TRUE(entry::gemm(nullptr, call));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fake().questions, 4);
  EXPECT_EQ(fake().products, 400);
}

}  // namespace
}  // namespace transformer_ops::cuda
