#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "src/bucket/double_stream.h"
#include "tests/bucket/forwarding_device.h"

namespace rekindle::bucket::testing {

// Flips one bit of an upload on its way to the device. Uploads that begin at the same host address
// are uploads of one bucket; buckets are numbered in the order of their first upload.
struct UploadFlip {
  std::size_t bucket = 0;
  std::uint64_t offset = 0;  // from the lowest address that the upload goes to
  int times = 1;             // of the bucket's uploads, the first so many
};

// Forwards to a double device and applies the flips. One thread uses all its streams.
class FlippingDevice final : public ForwardingDevice {
 public:
  FlippingDevice(Device& device, std::vector<UploadFlip> flips)
      : ForwardingDevice(device), flips_(std::move(flips)) {}
  Result<std::unique_ptr<Stream>> make_stream() override {
    TRY(auto stream, ForwardingDevice::make_stream());
    return std::make_unique<FlippingStream>(std::move(stream), *this);
  }

 private:
  class FlippingStream final : public Stream {
   public:
    FlippingStream(std::unique_ptr<Stream> inner, FlippingDevice& device)
        : inner_(std::move(inner)), device_(device) {}
    Result<void> upload(std::span<const Upload> copies) override {
      TRY_VOID(inner_->upload(copies));
      return device_.flip(copies, *inner_);
    }
    Result<void> move(std::span<const Move> copies) override { return inner_->move(copies); }
    Result<void> download(std::span<const Download> copies) override {
      return inner_->download(copies);
    }
    Result<void> digest(std::span<const BoxBytes> boxes, Digests& into) override {
      return inner_->digest(boxes, into);
    }
    Result<void> record(Event& event) override { return inner_->record(event); }
    Result<void> wait(Event& event) override { return inner_->wait(event); }
    Result<void> finish(TimePoint deadline) override { return inner_->finish(deadline); }

   private:
    const std::unique_ptr<Stream> inner_;
    FlippingDevice& device_;
  };

  Result<void> flip(std::span<const Upload> copies, Stream& stream) {
    const std::byte* const source = copies.front().from;
    const auto seen = std::find(sources_.begin(), sources_.end(), source);
    const auto bucket = static_cast<std::size_t>(seen - sources_.begin());
    if (seen == sources_.end()) sources_.push_back(source);
    DeviceAddress lowest = copies.front().to;
    for (const Upload& copy : copies) lowest = std::min(lowest, copy.to);
    for (UploadFlip& flip : flips_) {
      if (flip.bucket != bucket || flip.times == 0) continue;
      --flip.times;
      TRY_VOID(push_work(stream, [byte = lowest + flip.offset](const auto& /*stop*/) {
        *reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(byte)) ^= 0x10;
        return true;
      }));
    }
    return {};
  }

  std::vector<UploadFlip> flips_;
  std::vector<const std::byte*> sources_;  // the first copy's, of each bucket that has come
};

}  // namespace rekindle::bucket::testing
