#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recovery/device/mailbox.h"
#include "recovery/device/spreading.h"
#include "recovery/device/wire.h"
#include "recovery/device/worker_deliver.h"
#include "src/bucket/segment_fetch.h"
#include "src/bucket/upload_verify.h"

namespace rekindle::device {

struct SessionOrder {
  std::uint64_t number = 0;
  // Its device: a GPU that is opened for the first time takes long, so the session's thread asks.
  // All three outlive the session.
  std::function<Result<bucket::Device*>()> open;
  const bucket::Pinner* pinner = nullptr;
  Communicators* communicators = nullptr;  // in a round
  AttachedWords attached;
  bucket::SegmentFetch::Segments segments;
  UniqueFd socket;             // to the worker
  std::vector<Digest> leaves;  // of all tiles of the version; in a round, or to verify uploads
  bucket::SlotOptions slots;
  SessionTimes times;
  bool in_round = false;  // waits for what the round is to be
  // The session compares its own uploads with the leaves, on the device.
  bool verify_upload = false;
  std::function<void(RoundNews)> say;  // in a round; called by the session's thread
};

struct SessionEnd {
  std::optional<Error> error;  // nullopt: every bucket was delivered
  // The device has failed for good: only the end of this process frees what the session has of it.
  bool device_lost = false;
  std::uint64_t buckets = 0;
  std::uint64_t bytes = 0;
  Duration elapsed{};          // first bucket queued → last one released
  std::uint64_t refilled = 0;  // buckets that did not match and were uploaded once more
};

// The work of one session: from what the worker was attached to, to its last bucket. It polls while
// the device is about to be done with a bucket and sleeps otherwise. One thread.
class Serving {
 public:
  Serving(SessionOrder order, Mailbox& mailbox) : order_(std::move(order)), mailbox_(mailbox) {}

  // When it ends with device_lost, this must not be destroyed.
  SessionEnd run();

 private:
  Result<void> serve();
  Result<void> prepare();
  void say_joined();
  Result<std::optional<SpreadOrder>> await_orders();
  Result<bool> spread(SpreadOrder order);
  void refuse(const SpreadOrder& order, std::string_view why);
  Result<void> prepare_alone();
  Result<void> start_verifying();
  Result<void> deliver_all();
  Result<void> hear();
  void wait(bucket::Pipeline::State state, TimePoint now);
  bool all_pinned();
  bucket::Pipeline* pipeline();
  std::uint64_t refilled() const;
  void note_change(TimePoint now);
  std::vector<bucket::Part> parts_of(std::size_t index) const;
  void wait_for_worker(bool told_all);
  std::optional<Error> let_go(bool told_all, bool hung);

  SessionOrder order_;
  Mailbox& mailbox_;
  bucket::Device* device_ = nullptr;  // null: not opened
  ToldTiles told_;                    // while it is not alone
  std::string version_;               // for messages
  std::optional<bucket::Contents> contents_;
  std::optional<bucket::Slots> slots_;
  std::unique_ptr<WorkerDeliver> deliver_;
  std::unique_ptr<Spreading> spreading_;  // in a round that has begun; else these:
  std::optional<bucket::Plan> plan_;
  std::unique_ptr<bucket::SegmentFetch> fetch_;
  std::unique_ptr<bucket::UploadVerify> verify_;  // null: not wanted
  std::unique_ptr<bucket::Pipeline> pipeline_;
  std::size_t handed_over_ = 0;  // at the last step of the pipeline, as is awaited_
  bool awaited_ = false;         // a bucket awaited its hand-over
  TimePoint last_change_{};      // of the two
  std::optional<TimePoint> began_;
  bool pinned_ = false;
};

}  // namespace rekindle::device
