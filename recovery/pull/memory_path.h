#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/path.h"

namespace rekindle::pull {

// A Path over bytes that are already mapped in this process: the own store in another layout, or a
// fallback directory. Region i is segments[i], generation 0. Copies in bounded steps inside poll();
// a file that was truncated under its mapping ends in kFault, the destination's in kLocalFault.
class MemoryPath final : public transport::Path {
 public:
  MemoryPath(std::string name, std::vector<std::span<const std::byte>> segments,
             std::shared_ptr<const void> keep_alive);

  Result<std::size_t> post(std::span<const transport::ReadOp> ops) override;
  std::size_t poll(std::span<transport::Completion> out) override;
  void abort() override;
  std::size_t in_flight() const override { return queue_.size(); }
  std::uint64_t bytes_landed() const override { return bytes_landed_; }
  int wait_fd() const override { return -1; }
  std::string_view transport() const override { return "local"; }
  std::string describe() const override { return name_; }

 private:
  transport::OpStatus execute(const transport::ReadOp& op);

  const std::string name_;
  const std::vector<std::span<const std::byte>> segments_;
  const std::shared_ptr<const void> keep_alive_;
  std::deque<transport::ReadOp> queue_;
  std::uint64_t bytes_landed_ = 0;
  bool aborted_ = false;
};

}  // namespace rekindle::pull
