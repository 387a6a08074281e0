#pragma once

#include <chrono>
#include <cstdint>

#include "src/bucket/pipeline.h"
#include "src/cuda/nccl.h"

namespace rekindle::cuda {

// A round's all-gather by NCCL, in place: share r of each bucket comes from rank r
// (src/bucket/round.h).
class GatherSpread final : public bucket::Spread {
 public:
  // `patience`: for the peers to queue their part of a bucket; then kTimeout.
  GatherSpread(Communicator& communicator, std::uint64_t share_bytes,
               std::chrono::milliseconds patience)
      : communicator_(communicator), share_bytes_(share_bytes), patience_(patience) {}

  Result<void> enqueue(std::size_t, bucket::DeviceAddress at, bucket::Stream& stream) override {
    const auto rank = static_cast<std::uint64_t>(communicator_.rank());
    TRY_VOID(communicator_.all_gather(at + rank * share_bytes_, at, share_bytes_, stream));
    return communicator_.settle(SteadyClock().now() + patience_);
  }

 private:
  Communicator& communicator_;
  const std::uint64_t share_bytes_;
  const std::chrono::milliseconds patience_;
};

}  // namespace rekindle::cuda
