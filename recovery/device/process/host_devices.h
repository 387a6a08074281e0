#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "recovery/device/gpu_options.h"
#include "src/bucket/device.h"

namespace rekindle::device {

// The GPUs of this host. Each is opened when it is first used: an open GPU gives some of its memory
// to this process for as long as the process lives.
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
  // Doubles when their count is not 0, else all GPUs that the CUDA driver shows.
  static Devices find(const Doubles& doubles);

  const std::vector<One>& all() const { return all_; }
  // Why there are none.
  const std::string& problem() const { return problem_; }
  bool contains(const std::string& id) const;
  // The first device that opens. The ones before it leave the list. Null: none opens. Called before
  // any thread calls open().
  bucket::Device* open_first();
  // kNotFound. Any thread. The first call for a device opens it, which may take seconds; other
  // calls for it wait.
  Result<bucket::Device*> open(const std::string& id) const;
  // Those that are open now. Any thread.
  std::vector<bucket::Device*> opened() const;

 private:
  struct Place {
    std::mutex opening;
    // Guarded by `opening`; set once.
    std::unique_ptr<bucket::Device> device;
  };
  std::vector<One> all_;
  std::string problem_;
  // Of each device that was ever listed.
  std::map<std::string, std::unique_ptr<Place>> places_;
  Opener opener_;
};

}  // namespace rekindle::device
