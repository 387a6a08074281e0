#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "src/base/result.h"
#include "transport/verbs/device/fabric.h"
#include "transport/verbs/staged/stage_wire.h"

namespace rekindle::transport::verbs {

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
