// Encodes each of the 2^32 floats in every element format: the scalar formula against a walk along
// the ties of the format's numbers, then the kernels of each instruction set against one another,
// byte for byte. About two minutes on one core; too long for each run of the tests.
//
//   every_float
//
// Built with TRANSFORMER_OPS_TESTS, and with TRANSFORMER_OPS_NATIVE=OFF for each instruction set
// that the machine has. Exits with 1 at the first difference.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/encoding.h"
#include "kernels/quantize.h"

namespace {

using namespace transformer_ops;
using namespace transformer_ops::encoding;

[[noreturn]] void fail(const char* what, uint32_t bits) {
  std::printf("%s differs at %08x\n", what, bits);
  std::exit(1);
}

class Clock {
 public:
  explicit Clock(const char* what) : what_(what) {}
  ~Clock() {
    const auto end = std::chrono::steady_clock::now();
    std::printf("%-24s %6.1f s\n", what_, std::chrono::duration<double>(end - start_).count());
  }

 private:
  const char* what_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Both signs of each magnitude, in the order of the magnitudes: the code goes up by one at each
// tie, which belongs to the even one of its neighbours. Ties have few digits, so they are floats.
template <class E>
void walk(const char* what) {
  const Clock clock(what);
  uint32_t code = 0;
  const auto tie = [&] { return (decode<E>(code) + decode<E>(code + 1)) / 2; };
  float next = tie();
  for (uint32_t bits = 0; bits <= kInfinity; ++bits) {
    const float x = from_bits(bits);
    while (decode<E>(code) < E::kLargest && (code % 2 == 0 ? x > next : x >= next)) {
      ++code;
      next = tie();
    }
    uint32_t negative = -code & 0xff;
    if constexpr (!E::kInteger) negative = code | E::kSign;
    if (encode<E>(x, 1.0f) != code || encode<E>(-x, 1.0f) != negative) fail(what, bits);
  }
  for (uint32_t bits = kInfinity + 1; bits <= kMagnitude; ++bits) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      uint32_t nan = 0;
      if constexpr (!E::kInteger) nan = E::kNanCode | (sign != 0 ? E::kSign : 0);
      if (encode<E>(from_bits(bits | sign), 1.0f) != nan) fail(what, bits | sign);
    }
  }
}

// Blocks of neighbouring floats, and with one scale for all.
void compare(const kernel::Format& format) {
  const Clock clock(format.name);
  constexpr int64_t kRows = 1024, kWidth = 1024;
  std::vector<float> x(kRows * kWidth);
  std::vector<uint8_t> codes(x.size()), scales(x.size());
  std::vector<uint8_t> want(x.size()), want_scales(x.size());
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += x.size()) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = from_bits(static_cast<uint32_t>(first + i));
    const auto run = [&](const char* isa, auto& to, auto& to_scales) {
      const auto quantize = cpu::quantize.function_of(cpu::find_for(isa, cpu::quantize.name()));
      quantize(format, kernel::DType::Float32, x.data(), {.amax = 2688.0f}, to.data(),
               to_scales.data(), kRows, kWidth);
    };
    run(cpu::processor().kernels, want, want_scales);
    for (const char* isa : {"default", "avx2", "avx512"}) {
      if (!cpu::has_isa(isa)) continue;
      run(isa, codes, scales);
      if (codes != want || scales != want_scales) fail(isa, static_cast<uint32_t>(first));
    }
  }
}

}  // namespace

int main() {
  int isas = 0;
  for (const char* isa : {"default", "avx2", "avx512"}) isas += cpu::has_isa(isa);
  if (isas < 2) {
    std::puts("every_float must have two instruction sets to compare: TRANSFORMER_OPS_NATIVE=OFF");
    return 1;
  }
  walk<E4M3>("formula of e4m3");
  walk<E5M2>("formula of e5m2");
  walk<E2M1>("formula of e2m1");
  walk<Int8>("formula of int8");
  for (const char* name : {"e4m3", "e5m2", "e4m3 1x128", "mx e5m2", "nvfp4", "nvfp4 4over6",
                           "nvfp4 4over6 mse", "int8 1x32"}) {
    compare(*kernel::find_format(name));
  }
}
