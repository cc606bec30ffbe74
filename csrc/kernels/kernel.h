// Kernels register themselves. A header of a family, here in kernels/, declares a slot for each
// kernel; a file of a backend, in cpu/ or cuda/, fills it. A slot that only one op uses may be
// declared in the op's file and in the kernel's instead of a header: its first call compares the
// two.
//
//   inline const Kernel<void(DType, const void* x, void* y, int64_t n)> relu{"relu"};  // the slot
//   relu(dtype, x, y, n);                                                               // a call
//   namespace entry { void relu(DType, ...) {...} }  TRANSFORMER_OPS_KERNEL(relu, "avx2");
//
// A slot is filled by a constant in a section of the library, which the linker joins: no code of
// the file runs when the library is loaded. Code for AVX-512 could not run on every machine. For
// the same reason such files may declare slots, but never call one, nor any function of this file.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <typeinfo>

namespace transformer_ops::kernel {

// Its alignment is its size, so that the rows of a section form an array.
struct alignas(32) Row {
  const char* slot;
  const char* backend;   // an instruction set, or "cuda"
  const void* function;  // the address of the function pointer: only that is a constant expression
  const std::type_info* type;  // the type of the function
};
static_assert(sizeof(Row) == 32);

struct Rows {
  const Row *begin, *end;
};

extern "C" {
[[gnu::visibility("hidden")]] extern const Row __start_transformer_ops_kernels[];
[[gnu::visibility("hidden")]] extern const Row __stop_transformer_ops_kernels[];
}

// The rows of the library, or program, that the caller is linked into.
static inline Rows rows_of_this_library() {
  return {__start_transformer_ops_kernels, __stop_transformer_ops_kernels};
}

// Null if there is none.
inline const Row* find(Rows rows, const char* slot, const char* backend) {
  for (const Row* row = rows.begin; row != rows.end; ++row) {
    if (std::strcmp(row->slot, slot) == 0 && std::strcmp(row->backend, backend) == 0) {
      return row;
    }
  }
  return nullptr;
}

// A slot. Its kernel is looked up at the first call, which raises if there is none. The lookup is
// by name, because each library has slots of its own.
template <class Signature, const Row& (*find)(const char* slot)>
class Kernel;

template <class Result, class... Arguments, const Row& (*find)(const char* slot)>
class Kernel<Result(Arguments...), find> {
 public:
  using Signature = Result(Arguments...);
  using Pointer = Signature*;

  constexpr explicit Kernel(const char* name) : name_(name) {}

  const char* name() const { return name_; }

  // Raises if the row's function has another type.
  Pointer function_of(const Row& row) const {
    if (*row.type != typeid(Signature)) {
      throw std::runtime_error("[kernels] " + std::string(name_) + " must be a " +
                               typeid(Signature).name() + " for " + row.backend + ", got a " +
                               row.type->name());
    }
    Pointer function;
    std::memcpy(&function, row.function, sizeof(function));
    return function;
  }

  Result operator()(Arguments... arguments) const {
    Pointer function = __atomic_load_n(&function_, __ATOMIC_RELAXED);
    if (function == nullptr) [[unlikely]]
      function = choose();
    return function(arguments...);
  }

 private:
  [[gnu::noinline, gnu::cold]] Pointer choose() const {
    const Pointer function = function_of(find(name_));
    __atomic_store_n(&function_, function, __ATOMIC_RELAXED);
    return function;
  }

  const char* name_;
  mutable Pointer function_ = nullptr;
};

}  // namespace transformer_ops::kernel

// Fills a slot with the function entry::slot of the namespace in which the slot is declared.
#define TRANSFORMER_OPS_KERNEL(slot, backend)                                  \
  constexpr decltype(slot)::Pointer function_of_##slot = entry::slot;          \
  constexpr ::transformer_ops::kernel::Row row_of_##slot                       \
      [[maybe_unused, gnu::used, gnu::section("transformer_ops_kernels")]] = { \
          #slot, backend, &function_of_##slot, &typeid(decltype(slot)::Signature)}
