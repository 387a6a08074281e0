#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "src/tensor/box.h"
#include "src/tensor/tensor_set.h"

// Checkpoints whose every byte a test knows.
namespace rekindle::testing {

struct TestTensor {
  std::string name;
  DType dtype{};
  Shape shape;
  std::uint64_t bytes() const { return dtype_size_bytes(dtype) * shape.product(); }
};

class Checkpoint {
 public:
  Checkpoint(std::vector<TestTensor> tensors, std::uint64_t seed)
      : tensors_(std::move(tensors)), seed_(seed) {}

  // DIR/model.safetensors and DIR/config.json.
  void write(const std::filesystem::path& dir) const;
  // XXH3-128 of each tensor, and of the config, by name.
  std::map<std::string, std::string> sums() const;
  // Of a part of a matrix.
  std::string sum_of(const std::string& name, std::uint64_t row, std::uint64_t column,
                     std::uint64_t rows, std::uint64_t columns) const;

 private:
  std::string bytes_of(std::size_t tensor) const;

  const std::vector<TestTensor> tensors_;
  const std::uint64_t seed_;
};

// Every dtype in odd sizes, one without elements, one without dimensions, one of several MiB.
Checkpoint odd_checkpoint(std::uint64_t seed);
// So many tensors of 1 MiB.
Checkpoint plain_checkpoint(int tensors, std::uint64_t seed);

}  // namespace rekindle::testing
