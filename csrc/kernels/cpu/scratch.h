// Temporary memory of one kernel call, and sums over rows.
#pragma once

#include "dtype.h"

namespace transformer_ops::cpu {
namespace {

// An uninitialized array that lives as long as the call. It is not a std::vector: see dtype.h.
template <class A>
class Scratch {
 public:
  explicit Scratch(int64_t n) : data_(new A[static_cast<size_t>(n)]) {}
  ~Scratch() { delete[] data_; }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  A* data() { return data_; }

 private:
  A* data_;
};

// Column i of n is number i.
struct StoredOrder {
  static int64_t place(int64_t i, int64_t) { return i; }
};

// total[i] += sum over rows. Short groups of rows are summed in A, and the groups in double, so
// that sums over many rows stay accurate. A null total means that the sums are not wanted.
template <class A, class Order = StoredOrder>
class ColumnSums {
 public:
  ColumnSums(void* total, int64_t h) : total_(as<A>(total)), h_(h), group_(h), sum_(h) {
    memset(group_.data(), 0, static_cast<size_t>(h) * sizeof(A));
    memset(sum_.data(), 0, static_cast<size_t>(h) * sizeof(double));
  }
  ~ColumnSums() {
    if (total_ == nullptr) return;
    end_group();
    const double* sum = sum_.data();
    for (int64_t i = 0; i < h_; ++i) {
      total_[i] = static_cast<A>(total_[i] + sum[Order::place(i, h_)]);
    }
  }
  ColumnSums(const ColumnSums&) = delete;
  ColumnSums& operator=(const ColumnSums&) = delete;

  // The caller adds one row to this array, in that order, then calls end_row.
  A* group() { return group_.data(); }

  void end_row() { end_rows(1); }
  // The same for a few rows.
  void end_rows(int count) {
    rows_ += count;
    if (rows_ >= kGroup) end_group();
  }

 private:
  static constexpr int kGroup = 16;

  void end_group() {
    A* group = group_.data();
    double* sum = sum_.data();
#pragma omp simd
    for (int64_t i = 0; i < h_; ++i) {
      sum[i] += group[i];
      group[i] = 0;
    }
    rows_ = 0;
  }

  A* total_;
  int64_t h_;
  Scratch<A> group_;
  Scratch<double> sum_;
  int rows_ = 0;
};

}  // namespace
}  // namespace transformer_ops::cpu
