#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include "src/bucket/device.h"
#include "tests/client/fake_model.h"

namespace rekindle::client::testing {

struct ProducerScript {
  std::uint64_t bucket_bytes = 64u << 10;
  std::uint32_t slots = 3;
  // Number of filled buckets after which it dies.
  std::size_t dies_after = std::numeric_limits<std::size_t>::max();
  // Sent instead of its buffers.
  std::optional<Error> refuses;
  // Sends handles that cannot be opened.
  bool spoils_handles = false;
  // Sends wrong parts of the second bucket.
  bool spoils_parts = false;
};

// Plays the device process of one session, on a thread and a double of its own.
class DeviceProducer {
 public:
  // `attached` is the message to the worker; its boxes are delivered.
  DeviceProducer(const FakeModel& model, const proto::AgentFrame& attached,
                 ProducerScript script = {});
  ~DeviceProducer();
  DeviceProducer(const DeviceProducer&) = delete;
  DeviceProducer& operator=(const DeviceProducer&) = delete;

  UniqueFd take_worker_end() { return std::move(worker_end_); }
  // Waits for the end of the session. nullopt: everything was delivered.
  std::optional<Error> outcome();
  std::size_t filled() const { return filled_.load(); }

 private:
  void run(proto::AgentFrame attached);

  const FakeModel& model_;
  const ProducerScript script_;
  UniqueFd worker_end_;
  UniqueFd own_end_;
  std::atomic<std::size_t> filled_{0};
  std::optional<Error> outcome_;
  std::thread thread_;
};

}  // namespace rekindle::client::testing
