#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "recovery/device/options.h"
#include "src/bucket/device.h"

namespace rekindle::device {

// What this process has of its host's GPUs. One is opened when it is first used: an open one takes
// some of its memory for as long as the process lives. One thread.
class Devices {
 public:
  struct One {
    std::string id;
    std::string name;
    std::uint64_t total_bytes = 0;
  };
  // Doubles when their count is not 0, else all that the CUDA driver shows.
  static Devices find(const Doubles& doubles);

  const std::vector<One>& all() const { return all_; }
  const std::string& problem() const { return problem_; }  // why there are none
  Result<bucket::Device*> open(const std::string& id);     // kNotFound
  // The first that opens; those before it are taken off the list. Null: none does.
  bucket::Device* open_first();

 private:
  std::vector<One> all_;
  std::string problem_;
  std::vector<std::unique_ptr<bucket::Device>> open_;
  std::function<Result<std::unique_ptr<bucket::Device>>(const One&)> opener_;
};

// Whether this build can drive GPUs at all.
bool built_with_cuda();

}  // namespace rekindle::device
