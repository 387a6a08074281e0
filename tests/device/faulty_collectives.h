#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "src/bucket/double_device.h"
#include "src/bucket/double_stream.h"

namespace rekindle::device::testing {

// Blocks aborts until it is opened, like a driver that hangs.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
    changed_.notify_all();
  }
  int waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // This and the next member are guarded by mutex_.
  bool open_ = false;
  int waiting_ = 0;
};

// Collectives of doubles with other aborts. Without a gate an abort returns, and the queued work
// goes on.
class StuckCollective final : public bucket::Collective {
 public:
  StuckCollective(std::unique_ptr<bucket::Collective> inner, std::shared_ptr<Gate> gate)
      : inner_(std::move(inner)), gate_(std::move(gate)) {}
  ~StuckCollective() override { abort(); }

  std::uint32_t rank() const override { return inner_->rank(); }
  std::uint32_t ranks() const override { return inner_->ranks(); }
  Result<void> spread(bucket::DeviceAddress at, std::uint64_t share_bytes,
                      std::span<const std::uint32_t> owners, bucket::Stream& stream) override {
    return inner_->spread(at, share_bytes, owners, stream);
  }
  Result<bool> settled() override { return inner_->settled(); }
  void abort() override {
    if (gate_ == nullptr) {
      (void)inner_.release();
      return;
    }
    gate_->pass();
    inner_->abort();
  }

 private:
  std::unique_ptr<bucket::Collective> inner_;
  const std::shared_ptr<Gate> gate_;
};

class StuckCollectives final : public bucket::Collectives {
 public:
  explicit StuckCollectives(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}
  Result<std::string> make_id() override { return inner_->make_id(); }
  Result<std::unique_ptr<bucket::Collective>> meet(bucket::Device& device, std::uint32_t rank,
                                                   std::uint32_t ranks,
                                                   std::string_view id) override {
    TRY(auto met, inner_->meet(device, rank, ranks, id));
    return std::make_unique<StuckCollective>(std::move(met), gate_);
  }

 private:
  const std::unique_ptr<bucket::Collectives> inner_ = bucket::make_double_collectives();
  const std::shared_ptr<Gate> gate_;
};

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
