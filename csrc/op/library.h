// What another shared library adds: ops and fused ops under its own name.
#pragma once

#include <torch/headeronly/version.h>

#include <transformer_ops/version.h>
#include <string>
#include <vector>

#include "op/op.h"

namespace transformer_ops {

// The ops and fused ops of one library. All of them are registered, or none. Names have no prefix
// and belong to the library: a typed op becomes torch.ops.<library>.<name>, and a kind or a rule
// "<library>::<name>". A kind in a pattern is the library's own if it has one of that name, else a
// built-in one; "<other>::<kind>" is a kind of another library.
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
// Loading the same file again does nothing. Raises without registering anything if the file cannot
// be loaded, was built for another torch or transformer_ops, or has a name that is taken or wrong.
std::string load_library(const std::string& path);

}  // namespace transformer_ops

// This symbol is the same in every version, so that a library for another version reaches the error
// about it. `tag` is the text that the macro below writes.
extern "C" bool transformer_ops_add_library(const char* tag,
                                            void (*fill)(transformer_ops::Library&));

// Each library uses this once, with its name and a block that adds its ops.
//   TRANSFORMER_OPS_LIBRARY(my_ops, library) { library.add_op(...); }
#define TRANSFORMER_OPS_LIBRARY(name, library)                                                \
  extern "C" __attribute__((visibility("hidden"))) const char transformer_ops_library_tag[] = \
      TRANSFORMER_OPS_TAG(name, TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);                    \
  static void transformer_ops_fill_library(::transformer_ops::Library& library);              \
  [[maybe_unused]] static const bool transformer_ops_library_added =                          \
      transformer_ops_add_library(transformer_ops_library_tag, transformer_ops_fill_library); \
  static void transformer_ops_fill_library(::transformer_ops::Library& library)

// load_library() finds this text in the file before any code of the library runs.
#define TRANSFORMER_OPS_TAG(name, major, minor) TRANSFORMER_OPS_TAG_TEXT(name, major, minor)
#define TRANSFORMER_OPS_TAG_TEXT(name, major, minor)                               \
  "transformer_ops library " #name " for transformer_ops " TRANSFORMER_OPS_VERSION \
  " and torch " #major "." #minor
