// Checks products against the formula of kernels/gemm.h, row by row and in double: those of the
// emulated gemm() in test_gemm.cpp, and those of cuBLASLt in check_products.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/gemm_plan.h"
#include "kernels/encoding.h"
#include "kernels/math.h"
#include "numbers.h"

namespace transformer_ops::cuda {

struct Product {
  std::string name;
  Epilogue epilogue = Epilogue::None;
  DType dtype = DType::BFloat16;
  DType result_dtype = DType::BFloat16;
  bool a_transposed = false, b_transposed = false;
  bool extra = false;  // aux, or a bias gradient if there is no aux or aux is read
  int64_t m = 40, n = 128, k = 72;
  double alpha = 1.0, beta = 0.0;
  bool in_place = false;  // C is D
  int64_t pad = 0;        // additional elements of each row as stored
  int64_t offset = 0;     // the offset of A, B and C from an aligned address, in elements
  bool tf32 = false;
  bool factors_on_device = false;
  Codes a_codes = Codes::None, b_codes = Codes::None;
  bool has_scales = false;  // for codes
  Scaling a_scaling = Scaling::Matrix, b_scaling = Scaling::Matrix;
  bool fast_sums = false;
};

// The memory of gemm()'s operands.
struct Memory {
  std::function<void*(size_t bytes)> allocate;  // aligned by 256 bytes
  std::function<void(void*to, const void*from, size_t bytes)> upload, download;
  // The error of a GELU whose tanh is approximate, relative to its argument.
  double gelu_error = 0.0;
};

namespace {

// Half the relative distance of neighbouring numbers.
inline double unit(DType dtype) {
  if (dtype == DType::Float16) return 0x1p-11;
  return dtype == DType::BFloat16 ? 0x1p-8 : 0x1p-24;
}

// Numbers on the host, and a copy in gemm()'s memory.
class Array {
 public:
  Array(const Memory& memory, DType dtype, int64_t count, int64_t offset = 0)
      : memory_(memory),
        dtype_(dtype),
        offset_(offset),
        bytes_(static_cast<size_t>((count + offset + kGuard) * size_of(dtype)), kCanary),
        device_(static_cast<char*>(memory.allocate(bytes_.size()))) {}

  void fill(std::mt19937& random) {
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < size(); ++i) {
      set_number(dtype_, bytes_.data(), i + offset_, normal(random));
    }
  }
  // There are one or two codes in a byte; an array of 16-bit numbers has enough room.
  void fill_codes(Codes codes, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (char& byte : bytes_) {
      if (codes == Codes::E2M1) {
        byte = static_cast<char>(random() & 0xff);
        continue;
      }
      const float x = normal(random);
      byte = static_cast<char>(codes == Codes::E4M3 ? encoding::encode<encoding::E4M3>(x, 1.0f)
                                                    : encoding::encode<encoding::E5M2>(x, 1.0f));
    }
  }
  void set_byte(int64_t i, uint8_t byte) {
    bytes_[static_cast<size_t>(i)] = static_cast<char>(byte);
  }
  uint8_t get_byte(int64_t i) const { return static_cast<uint8_t>(bytes_[static_cast<size_t>(i)]); }
  double get_code(Codes codes, int64_t i) const {
    if (codes == Codes::E2M1) {
      return encoding::decode<encoding::E2M1>(i % 2 == 0 ? get_byte(i / 2) & 0xfu
                                                         : get_byte(i / 2) >> 4);
    }
    const auto byte = static_cast<uint8_t>(bytes_[static_cast<size_t>(i)]);
    return codes == Codes::E4M3 ? encoding::decode<encoding::E4M3>(byte)
                                : encoding::decode<encoding::E5M2>(byte);
  }
  void set(int64_t i, double value) { set_number(dtype_, bytes_.data(), i + offset_, value); }
  void upload() const { memory_.upload(device_, bytes_.data(), bytes_.size()); }
  void download() { memory_.download(bytes_.data(), device_, bytes_.size()); }

  int64_t size() const {
    return static_cast<int64_t>(bytes_.size()) / size_of(dtype_) - kGuard - offset_;
  }
  char* device() const { return device_ + offset_ * size_of(dtype_); }

  double get(int64_t i) const { return get_number(dtype_, bytes_.data(), i + offset_); }
  // The bytes before and after the numbers.
  bool guards_intact() const {
    const auto untouched = [](char byte) { return byte == kCanary; };
    const int64_t width = size_of(dtype_);
    return std::all_of(bytes_.begin(), bytes_.begin() + offset_ * width, untouched) &&
           std::all_of(bytes_.end() - kGuard * width, bytes_.end(), untouched);
  }

 private:
  static constexpr char kCanary = 0x5a;
  static constexpr int64_t kGuard = 16;

  const Memory& memory_;
  DType dtype_;
  int64_t offset_;
  std::vector<char> bytes_;
  char* device_;
};

// Scales of codes as cuBLASLt reads them: for the rows of A and the columns of B (`outers`), and
// for blocks of `inners`, which are summed over. They are powers of two, except for that of a whole
// matrix.
struct Scales {
  Scales(const Memory& memory, Scaling scaling, int64_t outers, int64_t inners, double one)
      : scaling(scaling),
        outers(outers),
        // Scales of 16 numbers are in tiles, which cover 64 numbers.
        blocks(scaling == Scaling::Vectors16 ? (inners + 63) / 64 : (inners + 127) / 128),
        array(memory, DType::Float32, count()) {
    std::mt19937 random(static_cast<unsigned>(outers));
    for (int64_t i = 0; i < array.size(); ++i) {
      const int power = static_cast<int>(random() % 5) - 2;
      array.set(i, scaling == Scaling::Matrix ? one : std::ldexp(1.0, power));
    }
    for (int64_t i = 0; is_in_tiles() && i < array.size() * 4; ++i) {
      const uint32_t e4m3 = encoding::encode<encoding::E4M3>(0.5f + static_cast<float>(i % 7), 1);
      array.set_byte(
          i, static_cast<uint8_t>(scaling == Scaling::Vectors16 ? e4m3 : 125 + random() % 5));
    }
  }

  bool is_in_tiles() const {
    return scaling == Scaling::Vectors32 || scaling == Scaling::Vectors16;
  }
  int64_t count() const {
    if (scaling == Scaling::Matrix) return 1;
    if (scaling == Scaling::Vectors128) return outers * blocks;
    const int64_t down = (outers + 127) / 128;
    return is_in_tiles() ? down * blocks * 128 : down * stride();
  }
  int64_t stride() const { return (blocks + 3) / 4 * 4; }
  double of(int64_t outer, int64_t inner) const {
    const int64_t block = inner / 128, row = outer % 128;
    if (scaling == Scaling::Matrix) return array.get(0);
    if (scaling == Scaling::Vectors128) return array.get(block * outers + outer);
    if (scaling == Scaling::Blocks128) return array.get(outer / 128 * stride() + block);
    if (scaling == Scaling::Vectors16) {
      const int64_t tile = outer / 128 * blocks + inner / 64;
      const int64_t place = tile * 512 + row % 32 * 16 + row / 32 * 4 + inner % 64 / 16;
      return encoding::decode<encoding::E4M3>(array.get_byte(place));
    }
    const int64_t at = (outer / 128 * blocks + block) * 512 + row % 32 * 16 + row / 32 * 4;
    return std::ldexp(1.0, array.get_byte(at + inner / 32 % 4) - 127);
  }
  const void* device() const { return array.device(); }

  Scaling scaling;
  int64_t outers, blocks;
  Array array;
};

// A row-major matrix, or the transpose of one.
struct Stored {
  Stored(const Memory& memory, DType dtype, int64_t rows, int64_t cols, bool transposed,
         const Product& product, Codes codes = Codes::None)
      : stride((transposed ? rows : cols) + product.pad),
        transposed(transposed),
        codes(codes),
        array(memory, dtype, (transposed ? cols : rows) * stride, product.offset) {}

  void fill(std::mt19937& random) {
    codes == Codes::None ? array.fill(random) : array.fill_codes(codes, random);
  }

  int64_t index(int64_t i, int64_t j) const { return transposed ? j * stride + i : i * stride + j; }
  double operator()(int64_t i, int64_t j) const {
    return codes == Codes::None ? array.get(index(i, j)) : array.get_code(codes, index(i, j));
  }
  Matrix matrix(const Product& product, const Scales& scales) const {
    const void* const scale = product.has_scales ? scales.device() : nullptr;
    return {array.device(), stride, transposed, codes, scale, scales.scaling};
  }
  // The values of A, whose columns are summed over, or of B, whose rows are.
  std::vector<double> values(int64_t rows, int64_t cols, const Scales& scales, bool is_left) const {
    std::vector<double> found;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        found.push_back((*this)(i, j) * (is_left ? scales.of(i, j) : scales.of(j, i)));
      }
    }
    return found;
  }

  int64_t stride;
  bool transposed;
  Codes codes;
  Array array;
};

struct Differences {
  std::string first;

  void expect(const std::string& what, int64_t i, int64_t j, double got, double wanted,
              double tolerance) {
    if (!first.empty() || std::abs(got - wanted) <= tolerance) return;
    first = what + "[" + std::to_string(i) + ", " + std::to_string(j) + "] must be " +
            std::to_string(wanted) + " within " + std::to_string(tolerance) + ", got " +
            std::to_string(got);
  }
  void expect(bool holds, const std::string& rule) {
    if (first.empty() && !holds) first = rule;
  }
};

}  // namespace

enum class Outcome { Right, Wrong, Unsupported };

// Computes a product, and reports the first difference.
inline Outcome check_product(const Product& product, const Memory& memory, std::string& text) {
  const auto [m, n, k] = std::array{product.m, product.n, product.k};
  const DType result = product.result_dtype;
  const bool gelu = product.epilogue == Epilogue::GeluBias;
  const bool adds_bias = product.epilogue == Epilogue::Bias || gelu;
  const bool sums = product.epilogue == Epilogue::SumA;
  const bool has_aux = product.extra && adds_bias;

  std::mt19937 random(7);
  const Scales a_scales(memory, product.a_scaling, m, k, product.has_scales ? 0.375 : 1.0);
  const Scales b_scales(memory, product.b_scaling, n, k, product.has_scales ? 2.5 : 1.0);
  Stored a(memory, product.dtype, m, k, product.a_transposed, product, product.a_codes);
  Stored b(memory, product.dtype, k, n, product.b_transposed, product, product.b_codes);
  Stored c(memory, result, m, n, false, product), d(memory, result, m, n, false, product);
  Array bias(memory, result, n), gradient(memory, result, m);
  Array aux(memory, result, m * n);
  for (Stored* stored : {&a, &b}) stored->fill(random);
  for (Array* array : {&c.array, &bias, &aux}) array->fill(random);
  Stored& start = product.in_place ? d : c;
  if (product.in_place) d.array.fill(random);
  const Stored started = start, untouched = d;
  for (Array* array : {&a.array, &b.array, &c.array, &d.array, &bias, &gradient, &aux}) {
    array->upload();
  }

  Array factors(memory, DType::Float32, 2);
  factors.set(0, product.alpha);
  factors.set(1, product.beta);
  factors.upload();
  a_scales.array.upload();
  b_scales.array.upload();
  Gemm call = {
      .m = m,
      .n = n,
      .k = k,
      .dtype = product.dtype,
      .result_dtype = result,
      .a = a.matrix(product, a_scales),
      .b = b.matrix(product, b_scales),
      .c = product.beta == 0 ? nullptr : start.array.device(),
      .c_stride = product.beta == 0 ? 0 : start.stride,
      .d = d.array.device(),
      .d_stride = d.stride,
      // It is not read if the factors are elsewhere.
      .alpha = product.factors_on_device ? 0.0 : product.alpha,
      .beta = product.beta,
      .factors =
          product.factors_on_device ? reinterpret_cast<const float*>(factors.device()) : nullptr,
      .epilogue = product.epilogue,
      .bias = adds_bias ? bias.device() : nullptr,
      .bias_gradient = sums ? gradient.device() : nullptr,
      .aux = has_aux ? aux.device() : nullptr,
      .aux_stride = has_aux ? n : 0,
      .tf32 = product.tf32,
      .fast_sums = product.fast_sums,
      .partial_sums = PartialSums::FullPrecision,
      .allocate = [](void* owner,
                     uint64_t bytes) { return static_cast<const Memory*>(owner)->allocate(bytes); },
      .owner = const_cast<Memory*>(&memory)};
  if (!entry::gemm(nullptr, call)) return Outcome::Unsupported;
  for (Array* array : {&d.array, &gradient, &aux}) array->download();

  // Errors of float sums grow with the number of terms. TF32 keeps 10 bits of each factor. An
  // H100's sums of products of codes are less exact than float32's: errors are up to 2^-12, or
  // 2^-10 with fast sums.
  const bool of_codes = product.a_codes != Codes::None;
  const double sum_error = product.tf32 ? 0x1p-9 : !of_codes ? 0x1p-20 : 0x1p-10;
  Differences differences;
  const std::vector<double> left = a.values(m, k, a_scales, /*is_left=*/true);
  const std::vector<double> right = b.values(k, n, b_scales, /*is_left=*/false);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double x = 0, terms = 0;
      for (int64_t l = 0; l < k; ++l) {
        const double term =
            left[static_cast<size_t>(i * k + l)] * right[static_cast<size_t>(l * n + j)];
        x += term;
        terms += std::abs(term);
      }
      x *= product.alpha;
      double error = sum_error * std::abs(product.alpha) * terms;
      if (product.beta != 0) x += product.beta * started(i, j);
      if (adds_bias) x += bias.get(j);
      error += sum_error * std::abs(x);
      const int64_t flat = i * n + j;
      if (gelu) {
        error = 1.2 * error + memory.gelu_error * std::abs(x);
        if (has_aux) {
          differences.expect("aux", i, j, aux.get(flat), x, error + unit(result) * std::abs(x));
        }
        x = math::GELU().forward(x);
      }
      error += 1.01 * unit(result) * std::abs(x);
      differences.expect("d", i, j, d(i, j), x, error);
    }
  }
  for (int64_t j = 0; sums && j < m; ++j) {
    double sum = 0, error = 0;
    for (int64_t l = 0; l < k; ++l) {
      sum += a(j, l);
      error += sum_error * std::abs(a(j, l));
    }
    differences.expect("bias_gradient", j, 0, gradient.get(j), sum,
                       error + 1.01 * unit(result) * std::abs(sum));
  }
  for (const Array* array : {&d.array, &gradient, &aux}) {
    differences.expect(array->guards_intact(), "memory around results must stay as it is");
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = n; j < d.stride; ++j) {
      const int64_t between = i * d.stride + j;
      differences.expect("between rows", i, j, d.array.get(between), untouched.array.get(between),
                         0);
    }
  }
  text = differences.first;
  return text.empty() ? Outcome::Right : Outcome::Wrong;
}

// Every epilogue with every way to store the operands, then special cases.
inline std::vector<Product> products() {
  struct Row {
    const char* name;
    Epilogue epilogue;
    bool extra;
  };
  static constexpr Row rows[] = {
      {"plain", Epilogue::None, false},    {"bias", Epilogue::Bias, false},
      {"gelu", Epilogue::GeluBias, false}, {"gelu_aux", Epilogue::GeluBias, true},
      {"sum_a", Epilogue::SumA, true},
  };
  struct Dtypes {
    const char* name;
    DType dtype, result;
  };
  static constexpr Dtypes dtypes[] = {{"bf16", DType::BFloat16, DType::BFloat16},
                                      {"fp16", DType::Float16, DType::Float16},
                                      {"fp32", DType::Float32, DType::Float32},
                                      {"bf16_fp32", DType::BFloat16, DType::Float32},
                                      {"fp16_fp32", DType::Float16, DType::Float32}};
  std::vector<Product> found;
  for (const Row& row : rows) {
    for (const Dtypes& types : dtypes) {
      for (const int stored : {0, 1, 2, 3}) {
        const char* const ways[] = {"nn", "tn", "nt", "tt"};
        found.push_back({.name = std::string(row.name) + "/" + types.name + "/" + ways[stored],
                         .epilogue = row.epilogue,
                         .dtype = types.dtype,
                         .result_dtype = types.result,
                         .a_transposed = (stored & 1) != 0,
                         .b_transposed = (stored & 2) != 0,
                         .extra = row.extra});
      }
    }
  }
  const auto add = [&](const char* name, Product product) {
    product.name = name;
    found.push_back(product);
  };
  add("scaled", {.alpha = -1.5});
  add("residual", {.beta = 1.0});
  add("factors", {.alpha = -1.5, .factors_on_device = true});
  add("factors_gelu",
      {.epilogue = Epilogue::GeluBias, .extra = true, .alpha = 0.25, .factors_on_device = true});
  add("factors_accumulate", {.result_dtype = DType::Float32,
                             .alpha = 0.25,
                             .beta = 1.0,
                             .in_place = true,
                             .factors_on_device = true});
  add("residual_bias", {.epilogue = Epilogue::Bias, .alpha = 0.5, .beta = 1.0});
  add("accumulate", {.result_dtype = DType::Float32, .beta = 1.0, .in_place = true});
  add("accumulate_tn",
      {.result_dtype = DType::Float32, .a_transposed = true, .beta = 1.0, .in_place = true});
  add("accumulate_sums", {.epilogue = Epilogue::SumA,
                          .result_dtype = DType::Float32,
                          .a_transposed = true,
                          .extra = true,
                          .beta = 1.0,
                          .in_place = true});
  add("strided", {.beta = 2.0, .pad = 8});
  add("strided_nt", {.b_transposed = true, .m = 33, .n = 136, .k = 40, .pad = 24});
  add("odd", {.b_transposed = true, .m = 7, .n = 5, .k = 3, .offset = 1});
  add("odd_bias", {.epilogue = Epilogue::Bias, .b_transposed = true, .m = 13, .n = 33, .k = 17});
  add("row", {.epilogue = Epilogue::Bias, .b_transposed = true, .m = 1});
  add("column", {.m = 96, .n = 1, .k = 64});
  add("tf32", {.dtype = DType::Float32, .result_dtype = DType::Float32, .tf32 = true});
  // These are all products of codes that ops use.
  const auto of_codes = [&](const char* name, Codes a, Codes b, Product product) {
    product.b_transposed = true;
    product.has_scales = true;
    product.k = 80;
    product.a_codes = a;
    product.b_codes = b;
    add(name, product);
  };
  of_codes("e4m3", Codes::E4M3, Codes::E4M3, {});
  of_codes("e4m3_fast", Codes::E4M3, Codes::E4M3, {.fast_sums = true});
  of_codes("e5m2_e4m3", Codes::E5M2, Codes::E4M3, {.m = 7, .alpha = 0.5});
  of_codes("e4m3_e5m2", Codes::E4M3, Codes::E5M2, {.n = 144});
  of_codes("e4m3_strided", Codes::E4M3, Codes::E4M3, {.pad = 16});
  of_codes("e4m3_bias", Codes::E4M3, Codes::E4M3, {.epilogue = Epilogue::Bias, .fast_sums = true});
  of_codes("e4m3_gelu", Codes::E4M3, Codes::E4M3, {.epilogue = Epilogue::GeluBias});
  of_codes("e4m3_gelu_aux", Codes::E4M3, Codes::E4M3,
           {.epilogue = Epilogue::GeluBias, .extra = true});
  of_codes("e4m3_residual", Codes::E4M3, Codes::E4M3, {.epilogue = Epilogue::Bias, .beta = 1.0});
  of_codes("e5m2_accumulate", Codes::E5M2, Codes::E4M3,
           {.result_dtype = DType::Float32, .beta = 1.0, .in_place = true});
  // The same with block scales, also with partial blocks except along k.
  const auto of_blocks = [&](const char* name, Scaling a, Scaling b, Product product) {
    of_codes(name, product.a_codes == Codes::None ? Codes::E4M3 : product.a_codes, Codes::E4M3,
             product);
    found.back().k = product.k == Product().k ? 640 : product.k;
    found.back().a_scaling = a;
    found.back().b_scaling = b;
  };
  const Scaling vectors = Scaling::Vectors128, blocks = Scaling::Blocks128;
  of_blocks("vectors_blocks", vectors, blocks, {.n = 144});
  of_blocks("blocks_vectors", blocks, vectors, {.m = 132});
  of_blocks("vectors_vectors", vectors, vectors, {.k = 256});
  of_blocks("vectors_e5m2", vectors, vectors, {.m = 4, .k = 128, .a_codes = Codes::E5M2});
  const Scaling mx = Scaling::Vectors32;
  of_blocks("mx", mx, mx, {.m = 160, .n = 160});
  of_blocks("mx_e5m2", mx, mx, {.m = 32, .k = 96, .a_codes = Codes::E5M2});
  of_blocks("mx_gelu_aux", mx, mx, {.epilogue = Epilogue::GeluBias, .extra = true, .m = 32});
  of_blocks("mx_residual", mx, mx, {.epilogue = Epilogue::Bias, .m = 32, .beta = 1.0});
  of_blocks("mx_accumulate", mx, mx,
            {.result_dtype = DType::Float32, .m = 32, .beta = 1.0, .in_place = true});
  // FP4 with factors in device memory, as the ops use it.
  const auto of_nvfp4 = [&](const char* name, Product product) {
    product.a_codes = Codes::E2M1;
    product.factors_on_device = true;
    of_codes(name, Codes::E2M1, Codes::E2M1, product);
    found.back().k = product.k == Product().k ? 352 : product.k;
    found.back().a_scaling = found.back().b_scaling = Scaling::Vectors16;
  };
  of_nvfp4("nvfp4", {.m = 160, .n = 272, .alpha = 0.75});
  of_nvfp4("nvfp4_few_rows", {.m = 7, .k = 32});
  of_nvfp4("nvfp4_strided", {.pad = 32});
  of_nvfp4("nvfp4_bias", {.epilogue = Epilogue::Bias, .alpha = 0.125});
  of_nvfp4("nvfp4_gelu_aux", {.epilogue = Epilogue::GeluBias, .extra = true, .alpha = 0.0625});
  of_nvfp4("nvfp4_residual", {.epilogue = Epilogue::Bias, .alpha = 0.5, .beta = 1.0});
  of_nvfp4("nvfp4_accumulate",
           {.result_dtype = DType::Float32, .alpha = 0.25, .beta = 1.0, .in_place = true});
  of_blocks("blocks_bias", vectors, blocks, {.epilogue = Epilogue::Bias});
  of_blocks("blocks_gelu", vectors, blocks, {.epilogue = Epilogue::GeluBias});
  of_blocks("blocks_gelu_aux", vectors, blocks, {.epilogue = Epilogue::GeluBias, .extra = true});
  of_blocks("blocks_residual", vectors, blocks, {.epilogue = Epilogue::Bias, .beta = 1.0});
  of_blocks("vectors_accumulate", vectors, vectors,
            {.result_dtype = DType::Float32, .beta = 1.0, .in_place = true});
  return found;
}

}  // namespace transformer_ops::cuda
