#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "recovery/device/options.h"
#include "src/bucket/device.h"

namespace rekindle::device {

// What this process has of its host's GPUs. One is opened when it is first used: an open one takes
// some of its memory for as long as the process lives.
class Devices {
 public:
  struct One {
    std::string id;
    std::string name;
    std::uint64_t total_bytes = 0;
  };
  using Opener = std::function<Result<std::unique_ptr<bucket::Device>>(const One&)>;
  Devices() = default;
  Devices(std::vector<One> all, Opener opener);
  // Doubles when their count is not 0, else all that the CUDA driver shows.
  static Devices find(const Doubles& doubles);

  const std::vector<One>& all() const { return all_; }
  const std::string& problem() const { return problem_; }  // why there are none
  bool contains(const std::string& id) const;
  // The first that opens; those before it are taken off the list. Null: none does. To be called
  // before any thread calls open().
  bucket::Device* open_first();
  // kNotFound. Any thread: the first to ask opens it, which may take seconds, and others wait.
  Result<bucket::Device*> open(const std::string& id) const;

 private:
  struct Place {
    std::mutex opening;
    std::unique_ptr<bucket::Device> device;  // under `opening`; set once
  };
  std::vector<One> all_;
  std::string problem_;
  std::map<std::string, std::unique_ptr<Place>> places_;  // of each that was ever listed
  Opener opener_;
};

// Whether this build can drive GPUs at all.
bool built_with_cuda();

}  // namespace rekindle::device
