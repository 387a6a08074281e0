#pragma once

#include <memory>
#include <utility>

#include "src/bucket/double_device.h"
#include "src/bucket/double_stream.h"

namespace rekindle::device::testing {

// A byte that changes on its way to a rank.
struct Flip {
  std::size_t rank = 0;
  std::size_t bucket = 0;
  // In the bucket.
  std::uint64_t offset = 0;
};

// Collectives of doubles that deliver one wrong byte.
class FlippingCollective final : public bucket::Collective {
 public:
  FlippingCollective(std::unique_ptr<bucket::Collective> inner, Flip flip)
      : inner_(std::move(inner)), flip_(flip) {}
  std::uint32_t rank() const override { return inner_->rank(); }
  std::uint32_t ranks() const override { return inner_->ranks(); }
  Result<void> spread(bucket::DeviceAddress at, std::uint64_t share_bytes,
                      std::span<const std::uint32_t> owners, bucket::Stream& stream) override {
    TRY_VOID(inner_->spread(at, share_bytes, owners, stream));
    if (count_++ != flip_.bucket) return {};
    return bucket::push_work(stream, [byte = at + flip_.offset](const auto& /*stop*/) {
      *reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(byte)) ^= 0x10;
      return true;
    });
  }
  Result<bool> settled() override { return inner_->settled(); }
  void abort() override { inner_->abort(); }

 private:
  const std::unique_ptr<bucket::Collective> inner_;
  const Flip flip_;
  std::size_t count_ = 0;
};

class FlippingCollectives final : public bucket::Collectives {
 public:
  explicit FlippingCollectives(Flip flip) : flip_(flip) {}
  Result<std::string> make_id() override { return inner_->make_id(); }
  Result<std::unique_ptr<bucket::Collective>> meet(bucket::Device& device, std::uint32_t rank,
                                                   std::uint32_t ranks,
                                                   std::string_view id) override {
    TRY(auto met, inner_->meet(device, rank, ranks, id));
    return std::make_unique<FlippingCollective>(std::move(met), flip_);
  }

 private:
  const std::unique_ptr<bucket::Collectives> inner_ = bucket::make_double_collectives();
  const Flip flip_;
};

}  // namespace rekindle::device::testing
