// Operands of products in the host's memory.
#pragma once

#include <memory>
#include <new>

#include "products.h"

namespace transformer_ops::cuda {

class HostMemory {
 public:
  Memory get() {
    const auto copy = [](void* to, const void* from, size_t bytes) {
      std::memcpy(to, from, bytes);
    };
    return {.allocate =
                [this](size_t bytes) {
                  blocks_.emplace_back(::operator new(bytes, kAlignment));
                  return blocks_.back().get();
                },
            .upload = copy,
            .download = copy};
  }

 private:
  static constexpr std::align_val_t kAlignment{256};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::vector<std::unique_ptr<void, Free>> blocks_;
};

}  // namespace transformer_ops::cuda
