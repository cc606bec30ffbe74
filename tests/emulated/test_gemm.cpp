// Plans of products, interpreted by gemm.cpp, against the row-major formula; and the rules by which
// a plan is refused, and told from another.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "host_memory.h"
#include "kernels/cuda/gemm_plan.h"

namespace transformer_ops::cuda {
namespace {

TEST(Gemm, EveryEpilogueOfEveryLayoutIsTheRowMajorFormula) {
  for (const Product& product : products()) {
    HostMemory blocks;
    const Memory memory = blocks.get();
    std::string text;
    EXPECT_EQ(check_product(product, memory, text), Outcome::Right) << product.name << ": " << text;
  }
}

TEST(Gemm, TheComparisonSeesAWrongProduct) {
  for (const Product& product : products()) {
    if (product.a_transposed || product.result_dtype != DType::BFloat16) continue;
    HostMemory blocks;
    Memory memory = blocks.get();
    bool first = true;
    memory.upload = [&first](void* to, const void* from, size_t bytes) {
      std::memcpy(to, from, bytes);
      // A, two elements further on.
      if (std::exchange(first, false)) std::memmove(to, static_cast<char*>(to) + 4, bytes - 4);
    };
    std::string text;
    EXPECT_EQ(check_product(product, memory, text), Outcome::Wrong) << product.name;
  }
}

// ---- rules

alignas(256) char memory[1024];

Gemm example() {
  return {.m = 4,
          .n = 128,
          .k = 16,
          .dtype = DType::BFloat16,
          .result_dtype = DType::BFloat16,
          .a = {memory, 16},
          .b = {memory, 128},
          .d = memory,
          .d_stride = 128};
}

TEST(GemmPlan, RefusesWhatCublasLtExcludes) {
  EXPECT_TRUE(plan_gemm(example()));
  const auto refused = [](auto change) {
    Gemm gemm = example();
    change(gemm);
    return !plan_gemm(gemm);
  };
  EXPECT_TRUE(refused([](Gemm& g) { g.m = 0; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.n = 0; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.k = 0; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.dtype = g.result_dtype = DType::Float64; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.result_dtype = DType::Float16; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.stride = 15; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.stride = 127; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.d_stride = 0; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.c_stride = 0; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.c = memory, g.c_stride = 0, g.beta = 1; }));
}

TEST(GemmPlan, AuxOfGeluHasRowsOf8) {
  const auto fits = [](Epilogue epilogue, int64_t n, int64_t stride, char* aux) {
    Gemm gemm = example();
    gemm.n = gemm.b.stride = gemm.d_stride = n;
    gemm.epilogue = epilogue;
    gemm.aux = aux;
    gemm.aux_stride = stride;
    return plan_gemm(gemm).has_value();
  };
  EXPECT_TRUE(fits(Epilogue::GeluBias, 24, 24, memory));
  EXPECT_TRUE(fits(Epilogue::GeluBias, 23, 24, memory + 16));
  EXPECT_FALSE(fits(Epilogue::GeluBias, 20, 20, memory));
  EXPECT_FALSE(fits(Epilogue::GeluBias, 24, 16, memory));
  EXPECT_FALSE(fits(Epilogue::GeluBias, 24, 24, memory + 8));
}

// E4M3 times E4M3, as codes have to be stored.
Gemm codes() {
  static const float scales[2] = {0.5f, 0.25f};
  Gemm gemm = example();
  gemm.a = {memory, 16, false, Codes::E4M3, scales};
  gemm.b = {memory, 16, true, Codes::E4M3, scales + 1};
  return gemm;
}

TEST(GemmPlan, CodesKeepTheirTypesAndScales) {
  Gemm gemm = codes();
  gemm.a.codes = Codes::E5M2;
  gemm.fast_sums = true;
  const GemmPlan plan = *plan_gemm(gemm);
  // cuBLASLt's A is the row-major B, and is transposed.
  EXPECT_EQ(plan.problem.a_codes, Codes::E4M3);
  EXPECT_EQ(plan.problem.b_codes, Codes::E5M2);
  EXPECT_EQ(plan.a_scale, gemm.b.scale);
  EXPECT_EQ(plan.b_scale, gemm.a.scale);
  EXPECT_TRUE(plan.problem.transpose_a);
  EXPECT_FALSE(plan.problem.transpose_b);
  EXPECT_TRUE(plan.problem.fast_sums);
}

TEST(GemmPlan, RefusesWhatNoGpuMultipliesOfCodes) {
  const auto refused = [](auto change) {
    Gemm gemm = codes();
    change(gemm);
    return !plan_gemm(gemm);
  };
  EXPECT_FALSE(refused([](Gemm&) {}));
  EXPECT_FALSE(refused([](Gemm& g) { g.m = 3; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.b.codes = Codes::E5M2; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.result_dtype = DType::Float32; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.a.scale = g.b.scale = nullptr; }));
  // Codes for one operand only, and E5M2 for both, are refused.
  EXPECT_TRUE(refused([](Gemm& g) { g.a.codes = Codes::None; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.codes = Codes::None; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.codes = g.b.codes = Codes::E5M2; }));
  // The layout.
  EXPECT_TRUE(refused([](Gemm& g) { g.a.transposed = true; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b = {memory, 128, false, Codes::E4M3, nullptr}; }));
  // Multiples of 16 bytes.
  EXPECT_TRUE(refused([](Gemm& g) { g.k = 8; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.n = 120; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.stride = 24; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.stride = 24; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.d_stride = 132; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.data = memory + 8; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.data = memory + 8; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.d = memory + 8; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.beta = 1, g.c = memory + 8, g.c_stride = 128; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.beta = 1, g.c = memory, g.c_stride = 132; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.beta = 1, g.c = memory, g.c_stride = 136; }));
  // Dtypes and epilogues.
  EXPECT_TRUE(refused([](Gemm& g) { g.dtype = g.result_dtype = DType::Float16; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.factors = static_cast<const float*>(g.a.scale); }));
  EXPECT_TRUE(refused([](Gemm& g) { g.epilogue = Epilogue::SumA; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.epilogue = Epilogue::Bias, g.bias = memory; }));
  EXPECT_TRUE(refused([](Gemm& g) {
    g.epilogue = Epilogue::Bias, g.bias = memory, g.result_dtype = DType::Float32;
  }));
}

// The same with scales of vectors and of blocks.
Gemm blocks() {
  Gemm gemm = codes();
  gemm.k = gemm.a.stride = gemm.b.stride = 128;
  gemm.a.scaling = Scaling::Vectors128;
  gemm.b.scaling = Scaling::Blocks128;
  gemm.a.scale = gemm.b.scale = reinterpret_cast<const float*>(memory);
  return gemm;
}

TEST(GemmPlan, ScalesOfBlocksAreAddedUpInFullPrecision) {
  Gemm gemm = blocks();
  gemm.fast_sums = true;
  const GemmPlan plan = *plan_gemm(gemm);
  EXPECT_EQ(plan.problem.a_scaling, Scaling::Blocks128);
  EXPECT_EQ(plan.problem.b_scaling, Scaling::Vectors128);
  EXPECT_FALSE(plan.problem.fast_sums);
}

TEST(GemmPlan, RefusesWhatNoGpuMultipliesOfBlocks) {
  const auto refused = [](auto change) {
    Gemm gemm = blocks();
    change(gemm);
    return !plan_gemm(gemm);
  };
  EXPECT_FALSE(refused([](Gemm&) {}));
  EXPECT_FALSE(refused(
      [](Gemm& g) { g.a.scaling = Scaling::Blocks128, g.b.scaling = Scaling::Vectors128; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.b.scaling = Scaling::Vectors128; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.scaling = Scaling::Blocks128; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.scaling = Scaling::Matrix; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.scaling = Scaling::Matrix; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.scaling = Scaling::Vectors32; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.a.scaling = g.b.scaling = Scaling::Vectors32, g.m = 32; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.scaling = g.b.scaling = Scaling::Vectors32, g.m = 4; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.scale = nullptr; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.scale = nullptr; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.scale = reinterpret_cast<const float*>(memory + 8); }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.scale = reinterpret_cast<const float*>(memory + 4); }));
  EXPECT_TRUE(refused([](Gemm& g) { g.m = 6; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.k = 112; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.n = 120; }));
}

// FP4 with scales of vectors of 16.
Gemm nvfp4() {
  Gemm gemm = blocks();
  gemm.m = 7;
  gemm.a.codes = gemm.b.codes = Codes::E2M1;
  gemm.a.scaling = gemm.b.scaling = Scaling::Vectors16;
  gemm.factors = reinterpret_cast<const float*>(memory);
  gemm.fast_sums = true;
  return gemm;
}

TEST(GemmPlan, Fp4HasScalesOf16AndFactorsOnTheDevice) {
  const GemmPlan plan = *plan_gemm(nvfp4());
  EXPECT_EQ(plan.problem.a_codes, Codes::E2M1);
  EXPECT_EQ(plan.problem.b_codes, Codes::E2M1);
  EXPECT_EQ(plan.problem.a_scaling, Scaling::Vectors16);
  EXPECT_EQ(plan.problem.b_scaling, Scaling::Vectors16);
  EXPECT_TRUE(plan.problem.factors_on_device);
  EXPECT_FALSE(plan.problem.fast_sums);
  // In elements.
  EXPECT_EQ(plan.problem.a, (Layout{128, 128, 128}));
  const auto refused = [](auto change) {
    Gemm gemm = nvfp4();
    change(gemm);
    return !plan_gemm(gemm);
  };
  EXPECT_FALSE(refused([](Gemm& g) { g.k = 96; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.n = 144, g.d_stride = 144; }));
  EXPECT_FALSE(refused([](Gemm& g) { g.factors = nullptr; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.k = 112; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.n = 120; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.stride = 144; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.stride = 144; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.transposed = true; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.transposed = false; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.scale = nullptr; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.scale = memory + 8; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.codes = Codes::E4M3; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.codes = g.b.codes = Codes::E4M3; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.b.scaling = Scaling::Vectors32; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.m = 32, g.a.scaling = g.b.scaling = Scaling::Vectors32; }));
  EXPECT_TRUE(refused([](Gemm& g) { g.a.scaling = g.b.scaling = Scaling::Matrix; }));
}

TEST(GemmPlan, OperandsSwapAndBecomeTransposes) {
  Gemm gemm = example();
  gemm.a.transposed = true;
  gemm.a.stride = 5;
  const GemmPlan plan = *plan_gemm(gemm);
  EXPECT_EQ(plan.problem.a, (Layout{128, 16, 128}));
  EXPECT_EQ(plan.problem.b, (Layout{4, 16, 5}));
  EXPECT_EQ(plan.problem.d, (Layout{128, 4, 128}));
  EXPECT_FALSE(plan.problem.transpose_a);
  EXPECT_TRUE(plan.problem.transpose_b);
}

TEST(GemmPlan, ProblemsThatMayNeedAnotherAlgorithmDiffer) {
  std::vector<LtProblem> problems = {plan_gemm(example())->problem};
  const auto add = [&](auto change) {
    Gemm gemm = example();
    change(gemm);
    problems.push_back(plan_gemm(gemm)->problem);
  };
  add([](Gemm& g) { g.m = 5; });
  add([](Gemm& g) { g.k = 15; });
  add([](Gemm& g) { g.a.stride = 24; });
  add([](Gemm& g) { g.b.stride = 136; });
  add([](Gemm& g) { g.d_stride = 136; });
  add([](Gemm& g) { g.dtype = g.result_dtype = DType::Float16; });
  add([](Gemm& g) { g.dtype = g.result_dtype = DType::Float32; });
  add([](Gemm& g) { g.dtype = g.result_dtype = DType::Float32, g.tf32 = true; });
  add([](Gemm& g) { g.result_dtype = DType::Float32; });
  add([](Gemm& g) { g.partial_sums = PartialSums::FullPrecision; });
  add([](Gemm& g) { g.partial_sums = PartialSums::None; });
  add([](Gemm& g) { g.factors = reinterpret_cast<const float*>(memory); });
  add([](Gemm& g) { g = codes(); });
  add([](Gemm& g) { g = codes(), g.fast_sums = true; });
  add([](Gemm& g) { g = codes(), g.a.codes = Codes::E5M2; });
  add([](Gemm& g) { g = codes(), g.b.codes = Codes::E5M2; });
  add([](Gemm& g) { g = blocks(); });
  add([](Gemm& g) { g = blocks(), g.b.scaling = Scaling::Vectors128; });
  add([](Gemm& g) { g = blocks(), g.m = 32, g.a.scaling = g.b.scaling = Scaling::Vectors32; });
  add([](Gemm& g) { g = blocks(), std::swap(g.a.scaling, g.b.scaling); });
  add([](Gemm& g) { g = nvfp4(); });
  add([](Gemm& g) { g = nvfp4(), g.factors = nullptr; });
  add([](Gemm& g) { g.a.data = memory + 16; });
  add([](Gemm& g) { g.b.data = memory + 16; });
  add([](Gemm& g) { g.b.data = memory + 2; });
  add([](Gemm& g) { g.d = memory + 32; });
  add([](Gemm& g) { g.beta = 1, g.c = memory + 64, g.c_stride = 128; });
  add([](Gemm& g) { g.epilogue = Epilogue::Bias, g.bias = memory; });
  add([](Gemm& g) { g.epilogue = Epilogue::Bias, g.bias = memory + 2; });
  add([](Gemm& g) { g.epilogue = Epilogue::GeluBias, g.bias = memory; });
  add([](Gemm& g) {
    g.epilogue = Epilogue::GeluBias, g.bias = g.aux = memory, g.aux_stride = 128;
  });
  std::set<size_t> hashes;
  for (size_t i = 0; i < problems.size(); ++i) {
    hashes.insert(LtProblemHash()(problems[i]));
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(problems[i] == problems[j]) << i << " " << j;
  }
  EXPECT_EQ(hashes.size(), problems.size());
}

TEST(GemmPlan, WhatDoesNotMatterIsLeftOut) {
  const LtProblem problem = plan_gemm(example())->problem;
  const auto same = [&](auto change) {
    Gemm gemm = example();
    change(gemm);
    return plan_gemm(gemm)->problem == problem;
  };
  EXPECT_TRUE(same([](Gemm& g) { g.alpha = 3; }));
  EXPECT_TRUE(same([](Gemm& g) { g.a.data = memory + 256; }));
  EXPECT_TRUE(same([](Gemm& g) { g.c = memory + 2, g.c_stride = 999; }));  // beta is 0
  EXPECT_TRUE(same([](Gemm& g) { g.tf32 = true; }));                       // of bfloat16
  EXPECT_TRUE(same([](Gemm& g) { g.fast_sums = true; }));                  // likewise
}

}  // namespace
}  // namespace transformer_ops::cuda
