#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "src/base/units.h"
#include "transport/verbs/device/fabric.h"
#include "transport/verbs/staged/stage_wire.h"

namespace rekindle::transport::verbs {

// One block, with room for a message in each direction. `mr` is for windows and for local use: its
// own key opens nothing to peers.
struct StageBlock {
  std::byte* data = nullptr;
  std::byte* received = nullptr;  // kStageMessageBytes each
  std::byte* sent = nullptr;
  ibv_mr* mr = nullptr;
};

// The registered window of one device, which staged links share. It is registered when it is made:
// later the segments may have used up the limits. Thread-safe.
class StagePool {
 public:
  // Makes blocks of `bytes` together, and a page of messages for each; as many as can be
  // registered.
  StagePool(Device& device, std::uint64_t bytes);
  ~StagePool();
  StagePool(const StagePool&) = delete;
  StagePool& operator=(const StagePool&) = delete;

  std::uint32_t block_bytes() const { return block_bytes_; }
  std::size_t size() const { return regions_.size(); }
  const std::string& problem() const { return problem_; }  // why size() is 0

  // Up to `wanted` blocks of zeros; fewer when few are left, so that others get some, too.
  std::vector<StageBlock> acquire(std::size_t wanted);
  // A block and its messages, which lie together.
  std::size_t step_bytes() const { return block_bytes_ + kPageBytes; }
  // Call this when no queue pair reaches the blocks any more.
  void release(const std::vector<StageBlock>& blocks);

 private:
  bool make(std::uint64_t bytes, std::uint32_t block_bytes);

  Device& device_;
  std::uint32_t block_bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::size_t mapped_bytes_ = 0;
  std::string problem_;
  std::vector<MrHandle> regions_;
  std::mutex mutex_;
  std::vector<StageBlock> free_;  // guarded by mutex_
};

// The puller's messages of one staged link, in a registered page.
class StageControl {
 public:
  static Result<std::unique_ptr<StageControl>> create(Device& device);
  ~StageControl();
  StageControl(const StageControl&) = delete;
  StageControl& operator=(const StageControl&) = delete;

  std::span<std::byte> to_receive(std::size_t index) const { return at(index); }
  std::span<std::byte> to_send(std::size_t index) const { return at(kMaxStageBlocks + index); }
  std::span<std::byte> scratch() const { return at(2 * kMaxStageBlocks).first(8); }
  ibv_sge entry(std::span<const std::byte> bytes) const {
    return {reinterpret_cast<std::uint64_t>(bytes.data()), static_cast<std::uint32_t>(bytes.size()),
            mr_->lkey};
  }

 private:
  StageControl() = default;
  std::span<std::byte> at(std::size_t index) const {
    return {page_ + index * kStageMessageBytes, kStageMessageBytes};
  }

  std::byte* page_ = nullptr;
  MrHandle mr_;
};

}  // namespace rekindle::transport::verbs
