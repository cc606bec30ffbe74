#include "executor/numbering.h"

#include <utility>

namespace transformer_ops {

int MetadataNumbers::request(int value) { return rows_.try_emplace(value, count()).first->second; }

void MetadataNumbers::insert_into(Program& program) const {
  program.metadata = count();
  if (rows_.empty()) return;
  std::vector<Program::Line> lines;
  const auto add = [&](const std::vector<int>& values, int op) {
    for (const int value : values) {
      const auto row = rows_.find(value);
      if (row == rows_.end()) continue;
      lines.push_back({.what = Program::TakeMetadata{value, row->second}, .op = op});
    }
  };
  add(program.inputs, 0);
  for (Program::Line& line : program.forward.lines) {
    const std::vector<int> written = values_written(line);
    const int op = line.op;
    lines.push_back(std::move(line));
    add(written, op);
  }
  program.forward.lines = std::move(lines);
}

}  // namespace transformer_ops
