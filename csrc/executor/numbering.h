// Numbers that the compiler assigns: to values, and to the metadata that backward reads.
#pragma once

#include <map>

#include "executor/program.h"

namespace transformer_ops {

// Numbers the values of one direction. Passing a value through only gives it a second name.
class Numbering {
 public:
  int fresh() { return count_++; }
  int define(const Value& value) { return names_[value] = fresh(); }
  void alias(const Value& value, int index) { names_[value] = index; }
  int find(const Value& value) const {
    const auto row = names_.find(value);
    return row == names_.end() ? -1 : row->second;
  }
  int count() const { return count_; }

 private:
  std::map<Value, int> names_;
  int count_ = 0;
};

// The forward values whose metadata backward reads.
class MetadataNumbers {
 public:
  int request(int value);
  int count() const { return static_cast<int>(rows_.size()); }
  // Takes the metadata directly after the line that writes the value, so that the value can be
  // freed.
  void insert_into(Program& program) const;

 private:
  std::map<int, int> rows_;  // by value
};

}  // namespace transformer_ops
