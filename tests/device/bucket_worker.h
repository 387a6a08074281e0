#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/bucket/bucket_messages.h"
#include "src/bucket/contents.h"
#include "src/bucket/device.h"
#include "src/ipc/channel.h"
#include "tests/bucket/sample.h"

// The other end of a device session: a worker on a double that takes its buckets step by step.
namespace rekindle::device::testing {

// A serialized AgentFrame with Attached.
std::string attached_frame(const bucket::testing::Sample& sample,
                           const std::vector<bucket::NamedBox>& wanted = {});

class BucketWorker {
 public:
  explicit BucketWorker(UniqueFd socket);

  // Takes Buffers and opens them. Throws if another message comes.
  void open();
  // One bucket; nullopt: the producer has finished, has failed or is gone.
  std::optional<bucket::FilledMessage> next();
  // Reads the bucket, and waits until that is done.
  void read(const bucket::FilledMessage& filled);
  void release(const bucket::FilledMessage& filled);
  // Calls next(), read() and release() until the end.
  void take_all();
  void say(bucket::Message message);
  void close();

  bool finished() const { return finished_; }
  const std::optional<Error>& failed() const { return failed_; }
  const bucket::BuffersMessage& buffers() const { return buffers_; }
  std::uint64_t buckets() const { return buckets_; }
  // The pieces whose bytes differ from the sample's; "": none.
  std::string compare(const bucket::testing::Sample& sample,
                      const std::vector<bucket::NamedBox>& wanted = {}) const;

 private:
  std::optional<bucket::Message> receive();

  std::optional<ipc::Channel> channel_;
  std::unique_ptr<bucket::Device> device_;
  std::unique_ptr<bucket::Stream> stream_;
  bucket::BuffersMessage buffers_;
  std::unique_ptr<bucket::Memory> memory_;
  std::vector<std::unique_ptr<bucket::Event>> filled_, released_;
  std::map<std::uint32_t, std::string> pieces_;
  std::uint64_t buckets_ = 0;
  bool finished_ = false;
  std::optional<Error> failed_;
};

}  // namespace rekindle::device::testing
