#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recovery/device/device_wire.h"
#include "recovery/device/process/session_mailbox.h"
#include "recovery/device/process/spreading.h"
#include "recovery/device/process/uploading.h"
#include "recovery/device/process/worker_deliver.h"

namespace rekindle::device {

struct SessionOrder {
  std::uint64_t number = 0;
  // Opens the device. The session's thread calls it, because a GPU takes long to open the first
  // time. The device, the pinner and the communicators outlive the session.
  std::function<Result<bucket::Device*>()> open;
  const bucket::Pinner* pinner = nullptr;
  // Null outside rounds.
  Communicators* communicators = nullptr;
  // Null: no device helps with the uploads.
  DeviceLoans* loans = nullptr;
  // Null: the device may be lent meanwhile.
  std::unique_ptr<DeviceLoans::Use> use;
  AttachedContents attached;
  bucket::SegmentFetch::Segments segments;
  // To the worker.
  UniqueFd socket;
  // Of all tiles of the version. Needed in a round, to verify uploads, and for direct reads.
  std::vector<Digest> leaves;
  bucket::SlotOptions slots;
  SessionTimes times;
  // The session waits for the orders of its round.
  bool in_round = false;
  // The session compares its own uploads with the leaves, on the device.
  bool verify_upload = false;
  // The agent may have NICs write to the session's slots. Needs the leaves.
  bool direct = false;
  // Reports to the agent. The session's thread calls it.
  std::function<void(SessionNews)> say;
};

struct SessionEnd {
  // nullopt: every bucket was delivered.
  std::optional<Error> error;
  // The device has failed for good: only the end of this process frees the session's part of it.
  bool device_lost = false;
  // Why the device of a helper can do nothing any more. The session itself went on.
  std::optional<Error> helper_lost;
  std::uint64_t buckets = 0;
  std::uint64_t bytes = 0;
  // From the first bucket that was queued to the release of the last one.
  Duration elapsed{};
  // Buckets that did not match and were uploaded once more.
  std::uint64_t refilled = 0;
  // Came over the links of other devices.
  std::uint64_t helped_bytes = 0;
};

// The work of one session, from its contents to the last bucket: it waits for the orders of a
// round, spreads, or uploads by itself, then lets go. It polls while the device is about to finish
// a bucket and sleeps otherwise. One thread.
class Serving {
 public:
  Serving(SessionOrder order, Mailbox& mailbox) : order_(std::move(order)), mailbox_(mailbox) {}

  // If it ends with device_lost, this object must not be destroyed.
  SessionEnd run();

 private:
  Result<void> serve();
  Result<void> prepare();
  SessionMeans means();
  void say_joined();
  Result<std::optional<SpreadOrder>> await_orders();
  Result<bool> spread(SpreadOrder order);
  bucket::Pipeline* pipeline();
  std::optional<TimePoint> began() const;
  std::uint64_t refilled() const;
  void wait_for_worker(bool told_all);
  std::optional<Error> let_go(bool told_all, bool hung);

  SessionOrder order_;
  Mailbox& mailbox_;
  // Null: not opened.
  bucket::Device* device_ = nullptr;
  // Until the uploads begin.
  ToldTiles told_;
  // For messages.
  std::string version_;
  std::optional<bucket::Contents> contents_;
  std::optional<bucket::Slots> slots_;
  std::unique_ptr<WorkerDeliver> deliver_;
  // In a round that has begun.
  std::unique_ptr<Spreading> spreading_;
  // Otherwise.
  std::unique_ptr<Uploading> uploading_;
};

}  // namespace rekindle::device
