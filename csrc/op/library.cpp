#include "op/library.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>

#include "fuser/fork_safe_mutex.h"
#include "fuser/registry.h"
#include "op/defaults.h"
#include "op/flops.h"
#include "op/rounded.h"
#include "op/signature.h"
#include "op/torch_library.h"

namespace transformer_ops {
namespace {

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

}  // namespace

// The rows of a library under their full names. All are checked before any is registered.
class LibraryRows {
 public:
  explicit LibraryRows(Library library) : library_(std::move(library)) {
    check_library_name();
    for (const Op& op : library_.ops_) own_kinds_.insert(op.declaration.kind);
    for (Op& op : library_.ops_) take(op);
    for (FusedOp& op : library_.fused_ops_) take(op);
  }

  void add() && {
    for (Op& op : library_.ops_) register_op(library_.name_, std::move(op));
    for (FusedOp& op : library_.fused_ops_) register_fused_op(library_.name_, std::move(op));
  }

 private:
  void check_library_name() const {
    const bool is_taken = library_.name_ == "transformer_ops" || library_.name_ == "aten";
    TORCH_CHECK(!is_taken, "[load_library] library must have a name of its own, got '",
                library_.name_, "'");
  }

  void take(Op& op) {
    derive_backward(op);
    OpDeclaration& row = op.declaration;
    for (TypedOp* typed : {&op.forward, &op.backward, &op.recompute}) take(*typed, row.kind);
    if (row.kind.empty()) return;
    TORCH_CHECK(!has_namespace(row.kind), "[", library_.name_,
                "] kind must have no namespace, which is the library's name, got '", row.kind, "'");
    row.kind = full(row.kind);
    const bool is_new = kinds_.insert(row.kind).second && !is_declared(row.kind);
    TORCH_CHECK(is_new, "[", library_.name_, "] kind must be new, got '", row.kind, "'");
    row.forward = op.forward.schema;
    row.backward = op.backward.schema;
    row.recompute = op.recompute.schema;
    checked(row);
  }

  void take(FusedOp& op) {
    Rule& rule = op.rule;
    for (TypedOp* typed : {&op.forward, &op.backward, &op.recompute}) take(*typed, rule.name);
    rule.name = full(rule.name);
    for (PatternOp& entry : rule.pattern) {
      for (std::string& kind : entry.kinds) {
        if (own_kinds_.contains(kind)) kind = full(kind);
        TORCH_CHECK(kinds_.contains(kind) || is_declared(kind), "[", rule.name,
                    "] pattern must name kinds that are declared, got '", kind, "'");
      }
    }
    const bool is_new = rules_.emplace(rule.pass, rule.name).second;
    TORCH_CHECK(is_new, "[", library_.name_, "] rule must be new in its pass, got '", rule.name,
                "'");
    rule.forward = op.forward.schema;
    rule.backward = op.backward.schema;
    rule.recompute = op.recompute.schema;
    checked(rule);
  }

  // `owner`: the kind or the rule.
  void take(TypedOp& op, const std::string& owner) {
    if (op.schema.empty()) return;
    std::string name = parse_schema(op.schema).name;
    if (has_namespace(name)) return check_exists(name, op);
    op.schema = full(op.schema);
    name = full(name);
    check_schema(op.schema);
    complete(op);
    TORCH_CHECK(op.shape, "[", name, "] .shape must be given unless the one result is like the ",
                "first tensor, got none in '", owner, "' for '", op.schema, "'");
    const Signature signature(op.schema, op.any_strides);
    for (const std::string& name : op.overwrites) signature.index_of(name, "overwrites");
    check_products(op);
    check_by_rows(op);
    check_new(name);
    for (const std::string& other : other_names(name, op)) check_new(other);
  }

  void check_schema(const std::string& schema) const {
    try {
      torch::jit::parseSchema(schema);
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "[", library_.name_, "] schema must be one that torch reads, got '",
                  schema, "': ", text_of(error));
    }
  }

  // Raises if another library has not registered the op.
  void check_exists(const std::string& name, const TypedOp& op) const {
    const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
    TORCH_CHECK(found.has_value() && !op.shape, "[", library_.name_,
                "] schema must have no namespace, which is the library's name, or name a "
                "registered op without .shape, got '",
                op.schema, "'");
  }

  void check_new(const std::string& name) {
    const bool is_new = typed_ops_.insert(name).second && find_typed_op(name) == nullptr &&
                        !c10::Dispatcher::singleton().findSchema({name, ""});
    TORCH_CHECK(is_new, "[", library_.name_, "] typed op must have a new name, got '", name, "'");
  }

  std::string full(const std::string& name) const { return library_.name_ + "::" + name; }

  Library library_;
  std::set<std::string> own_kinds_;  // the kinds as the library spells them
  std::set<std::string> kinds_, typed_ops_;
  std::set<std::pair<Pass, std::string>> rules_;
};

namespace {

namespace fs = std::filesystem;

// ---- the tag in a file

constexpr const char* kTagStart = "transformer_ops library ";

struct Tag {
  std::string library, version, torch;
};

// Parses "transformer_ops library my_ops for transformer_ops 1.2.3 and torch 2.11".
std::optional<Tag> parse_tag(const std::string& text) {
  std::istringstream in(text);
  const std::vector<std::string> words(std::istream_iterator<std::string>(in), {});
  if (words.size() != 9 || words[3] != "for" || words[7] != "torch") return std::nullopt;
  return Tag{.library = words[2], .version = words[5], .torch = words[8]};
}

Tag read_tag(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "[load_library] path must be a file that can be read, got '", path, "'");
  std::string bytes(fs::file_size(path), '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  std::optional<Tag> tag;
  for (size_t at = 0; !tag && (at = bytes.find(kTagStart, at)) != std::string::npos; ++at) {
    tag = parse_tag(bytes.c_str() + at);
  }
  TORCH_CHECK(tag, "[load_library] file must be a library that calls TRANSFORMER_OPS_LIBRARY ",
              "(transformer_ops/extension.h), got '", path, "'");
  return *tag;
}

void check_built_for_us(const Tag& tag) {
  TORCH_CHECK(tag.version == TRANSFORMER_OPS_VERSION, "[", tag.library,
              "] library must be built for transformer_ops " TRANSFORMER_OPS_VERSION
              ", got one for transformer_ops ",
              tag.version, ": build it again");
  const std::string torch = c10::str(TORCH_VERSION_MAJOR, ".", TORCH_VERSION_MINOR);
  TORCH_CHECK(tag.torch == torch, "[", tag.library, "] library must be built for torch ", torch,
              ", got one for torch ", tag.torch, ": build it again");
}

// ---- loaded libraries

struct Loaded {
  fs::path file;
  fs::file_time_type written;
};

struct Libraries {
  ForkSafeMutex mutex;
  std::map<std::string, Loaded> rows;
};

Libraries& libraries() {
  static Libraries libraries;
  return libraries;
}

fs::file_time_type time_of(const fs::path& file) {
  std::error_code none;  // a file may be deleted by now
  return fs::last_write_time(file, none);
}

std::optional<Loaded> find_library(const std::string& name) {
  const std::lock_guard lock(libraries().mutex);
  const auto row = libraries().rows.find(name);
  return row == libraries().rows.end() ? std::nullopt : std::optional(row->second);
}

void check_new_library(const std::string& name, const fs::path& file) {
  const auto loaded = find_library(name);
  TORCH_CHECK(!loaded, "[load_library] library must have a new name, got '", name, "' of ", file,
              ", which ", loaded->file, " has brought");
}

// Is the file loaded? Raises if another library of that name is, or another build of this file.
bool is_loaded(const std::string& name, const std::string& path) {
  const auto loaded = find_library(name);
  if (!loaded) return false;
  std::error_code none;
  if (!fs::equivalent(loaded->file, path, none)) check_new_library(name, path);
  TORCH_CHECK(loaded->written == time_of(path),
              "[load_library] file must be as it was loaded, got "
              "a newer build of '",
              path, "': start a new process");
  return true;
}

// The ops that a library lists, and the file that it is in.
struct Found {
  Library library;
  fs::path file;
};

void add(Found found) {
  const std::string name = found.library.name();
  const fs::file_time_type written = time_of(found.file);
  // This is no ForkSafeMutex: such locks are taken while this one is held, and a forked child has
  // only half of the library anyway.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  check_new_library(name, found.file);
  LibraryRows(std::move(found.library)).add();
  const std::lock_guard rows_lock(libraries().mutex);
  libraries().rows[name] = {found.file, written};
}

Found collect(const char* tag_text, void (*fill)(Library&)) {
  const auto tag = parse_tag(tag_text);
  TORCH_CHECK(tag, "[load_library] tag must be what TRANSFORMER_OPS_LIBRARY writes, got '",
              tag_text, "'");
  check_built_for_us(*tag);
  Dl_info place;
  const bool is_known = dladdr(tag_text, &place) != 0;
  Library library(tag->library);
  fill(library);
  return {std::move(library), is_known ? place.dli_fname : ""};
}

// What load_library() collects while the static objects of a file are made: they must not throw.
struct Load {
  std::vector<Found> found;
  std::string error = {};
};

thread_local Load* current_load = nullptr;

class LoadHere {
 public:
  explicit LoadHere(Load& load) { current_load = &load; }
  ~LoadHere() { current_load = nullptr; }
};

void* open(const std::string& path, Load& load) {
  const LoadHere here(load);
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

void register_all(Load& load) {
  TORCH_CHECK(load.error.empty(), load.error);
  for (Found& found : load.found) add(std::move(found));
}

}  // namespace

std::string load_library(const std::string& path) {
  TORCH_CHECK(current_load == nullptr,
              "[load_library] path must be loaded after the library that "
              "asks for it, got '",
              path, "'");
  // This must not be the lock of add(): a thread that opens a library itself takes the loader's
  // lock before that one.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const Tag tag = read_tag(path);
  check_built_for_us(tag);
  if (is_loaded(tag.library, path)) return tag.library;
  Load load;
  void* const handle = open(fs::absolute(path), load);
  TORCH_CHECK(handle != nullptr, "[", tag.library,
              "] library must be one that the system can load, got ", dlerror());
  try {
    register_all(load);
  } catch (...) {
    // The rows refer to the library's code, so they are freed first. A repaired file of this path
    // can be loaded later.
    load.found.clear();
    if (!find_library(tag.library)) dlclose(handle);
    throw;
  }
  TORCH_CHECK(find_library(tag.library), "[", tag.library,
              "] library must be new to the process, got one that was opened before and has "
              "registered nothing: start a new process");
  return tag.library;
}

}  // namespace transformer_ops

extern "C" bool transformer_ops_add_library(const char* tag,
                                            void (*fill)(transformer_ops::Library&)) {
  using namespace transformer_ops;
  std::string error;
  try {
    Found found = collect(tag, fill);
    if (current_load == nullptr) {
      add(std::move(found));
    } else {
      current_load->found.push_back(std::move(found));
    }
    return true;
  } catch (const std::exception& caught) {
    error = text_of(caught);
  } catch (...) {
    error = "a library must throw nothing but std::exception, got something else";
  }
  if (current_load == nullptr) {
    TORCH_WARN("nothing of a library is registered: ", error);
  } else if (current_load->error.empty()) {
    current_load->error = error;
  }
  return false;
}
