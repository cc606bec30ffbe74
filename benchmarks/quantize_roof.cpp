// What it costs to encode and decode bfloat16 numbers, and to round them to those of a format, as
// multiples of a copy of them.
//
//   quantize_roof [elements in 1024, 1024] [rounds=200]
//
// One thread; rounds of all kernels and of memcpy alternate, and a ratio is that of the medians.
// The numbers lie in rows of 4096. Built with TRANSFORMER_OPS_TESTS; TRANSFORMER_OPS_ISA chooses
// the instruction set.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "kernels/encoding.h"
#include "kernels/quantize.h"

namespace {

using namespace transformer_ops;

constexpr int64_t kWidth = 4096;

// Normal numbers in bfloat16.
std::vector<uint16_t> make_numbers(int64_t n) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> numbers(n);
  for (uint16_t& number : numbers) {
    number = static_cast<uint16_t>(encoding::bits_of(normal(generator)) >> 16);
  }
  return numbers;
}

struct Row {
  std::string name;
  std::function<void()> run;
  std::vector<double> times = {};

  double median() {
    std::ranges::nth_element(times, times.begin() + times.size() / 2);
    return times[times.size() / 2];
  }
};

double milliseconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t n = (argc > 1 ? std::atoll(argv[1]) : 1024) * 1024, rows = n / kWidth;
  const int64_t rounds = argc > 2 ? std::atoll(argv[2]) : 200;
  const auto bf16 = kernel::DType::BFloat16;
  const std::vector<uint16_t> x = make_numbers(n);
  std::vector<uint16_t> y(n);

  struct Encoded {
    std::vector<uint8_t> codes, scales;
    float tensor_scale;
  };
  std::vector<std::unique_ptr<Encoded>> all;
  std::vector<Row> table;
  table.push_back({"copy", [&] { std::memcpy(y.data(), x.data(), n * sizeof(uint16_t)); }});
  for (const kernel::Format& format : kernel::kFormats) {
    all.push_back(
        std::make_unique<Encoded>(Encoded{std::vector<uint8_t>(n), std::vector<uint8_t>(n), 1.0f}));
    Encoded& to = *all.back();
    const std::string name = format.name;
    const auto scale_of = [&] {
      if (!format.per_tensor() && !format.has_tensor_scale()) return kernel::TensorScale();
      return encoding::scale_of_tensor(format, cpu::largest(bf16, x.data(), n));
    };
    table.push_back({"encode " + name, [&, scale_of] {
                       const auto scale = scale_of();
                       to.tensor_scale = scale.encode;
                       cpu::quantize(format, bf16, x.data(), scale, to.codes.data(),
                                     to.scales.data(), rows, kWidth);
                     }});
    table.push_back({"round " + name, [&, scale_of] {
                       cpu::round_to_format(format, bf16, bf16, x.data(), scale_of(), y.data(),
                                            rows, kWidth);
                     }});
    if (format.element != kernel::Element::Int8) {
      table.push_back({"random " + name, [&, scale_of] {
                         cpu::round_at_random(format, bf16, bf16, x.data(), scale_of(), /*seed=*/1,
                                              /*first_row=*/0, y.data(), rows, kWidth);
                       }});
    }
    table.push_back({"decode " + name, [&] {
                       cpu::dequantize(format, bf16, to.codes.data(), to.scales.data(),
                                       1.0f / to.tensor_scale, y.data(), rows, kWidth);
                     }});
  }
  for (int64_t round = 0; round < rounds; ++round) {
    for (Row& row : table) row.times.push_back(milliseconds(row.run));
  }
  const double copy = table[0].median();
  std::printf("%s, %ld x %ld bfloat16 numbers, copy %.3f ms\n", cpu::processor().kernels,
              static_cast<long>(rows), static_cast<long>(kWidth), copy);
  for (Row& row : table) {
    std::printf("%-20s %7.3f ms  %5.2f\n", row.name.c_str(), row.median(), row.median() / copy);
  }
}
