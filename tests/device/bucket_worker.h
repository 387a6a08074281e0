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

// The other end of a device session: a worker that takes its buckets on a double, as told.
namespace rekindle::device::testing {

// AgentFrame with Attached.
std::string attached_frame(const bucket::testing::Sample& sample,
                           const std::vector<bucket::NamedBox>& wanted = {});

class BucketWorker {
 public:
  explicit BucketWorker(UniqueFd socket);

  // Takes Buffers and opens them. Throws when something else comes.
  void open();
  // One bucket; nullopt when the producer has finished or failed, or has gone.
  std::optional<bucket::FilledMessage> next();
  void read(const bucket::FilledMessage& filled);     // and waits until it is done
  void release(const bucket::FilledMessage& filled);  // says so
  void take_all();                                    // next, read, release until the end
  void say(bucket::Message message);
  void close();

  bool finished() const { return finished_; }
  const std::optional<Error>& failed() const { return failed_; }
  const bucket::BuffersMessage& buffers() const { return buffers_; }
  std::uint64_t buckets() const { return buckets_; }
  // The pieces that do not have the sample's bytes; "" when all have.
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
