// What another shared library brings: ops and fused ops under a name of its own.
#pragma once

#include <torch/headeronly/version.h>

#include <transformer_ops/version.h>
#include <string>
#include <vector>

#include "op/op.h"

namespace transformer_ops {

// The ops and fused ops of one library, which are registered together or not at all. Names are
// written plainly and belong to the library: a typed op is torch.ops.<library>.<name>, a kind or a
// rule "<library>::<name>". A kind in a pattern is the library's own, else a built-in one;
// "<other>::<kind>" is that of another library.
class Library {
 public:
  explicit Library(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  void add_op(Op op) { ops_.push_back(std::move(op)); }
  void add_fused_op(FusedOp op) { fused_ops_.push_back(std::move(op)); }

 private:
  friend class LibraryRows;

  std::string name_;
  std::vector<Op> ops_;
  std::vector<FusedOp> fused_ops_;
};

// Loads a shared library and registers what its TRANSFORMER_OPS_LIBRARY lists; returns its name.
// The same file again does nothing. Raises, with nothing registered, where the file cannot be
// loaded or was built for another torch or transformer_ops, and where a name is taken or wrong.
std::string load_library(const std::string& path);

}  // namespace transformer_ops

// The same in every version, so that a library of another one gets as far as its error. `tag` is
// what the macro below writes.
extern "C" bool transformer_ops_add_library(const char* tag,
                                            void (*fill)(transformer_ops::Library&));

// Once in a library: its name, and a block that adds its ops.
//   TRANSFORMER_OPS_LIBRARY(my_ops, library) { library.add_op(...); }
#define TRANSFORMER_OPS_LIBRARY(name, library)                                                \
  extern "C" __attribute__((visibility("hidden"))) const char transformer_ops_library_tag[] = \
      TRANSFORMER_OPS_TAG(name, TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);                    \
  static void transformer_ops_fill_library(::transformer_ops::Library& library);              \
  [[maybe_unused]] static const bool transformer_ops_library_added =                          \
      transformer_ops_add_library(transformer_ops_library_tag, transformer_ops_fill_library); \
  static void transformer_ops_fill_library(::transformer_ops::Library& library)

// The loader finds it in the file, before any code of the library runs.
#define TRANSFORMER_OPS_TAG(name, major, minor) TRANSFORMER_OPS_TAG_TEXT(name, major, minor)
#define TRANSFORMER_OPS_TAG_TEXT(name, major, minor)                               \
  "transformer_ops library " #name " for transformer_ops " TRANSFORMER_OPS_VERSION \
  " and torch " #major "." #minor
