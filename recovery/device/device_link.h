#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/device.pb.h"
#include "recovery/device/device_child.h"
#include "recovery/device/device_ledger.h"
#include "recovery/device/device_life.h"
#include "recovery/device/device_order.h"
#include "recovery/device/gpu_options.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/bucket/block_digests.h"
#include "src/bucket/contents.h"
#include "src/ipc/framed_socket.h"

namespace rekindle::device {

struct LinkOptions {
  GpuOptions gpu;
  std::string program = "/proc/self/exe";
  // From StopSpread to SpreadOver: longer than an abort and the queued work may take by themselves.
  std::chrono::milliseconds stop{60'000};
  DeviceLife::Times life;
};

struct LinkStatus {
  DeviceLife::State state = DeviceLife::State::kOff;
  std::vector<DeviceInfo> devices;
  // Bytes of the copies that the process should pin.
  std::uint64_t held_bytes = 0;
  std::uint64_t pinned_bytes = 0;
  std::size_t sessions = 0;
  std::uint64_t restarts = 0;
  // 0: no process runs.
  std::uint32_t pid = 0;
  // The last one. In the state kOff: why it is off.
  std::string problem;
};

// The agent's side of the device process. It starts the process, again whenever it ends, and hands
// it the copies that are on this host. On a host without GPUs it exists, and says so. Control
// thread only.
class DeviceLink {
 public:
  DeviceLink(boost::asio::any_io_executor executor, LinkOptions options);
  void start();
  // Asks the process to end, then kills it.
  async::Task<void> close(std::chrono::milliseconds deadline);
  // Receives the events of the sessions; null: nobody does.
  void tell_events(DeviceEvents* events) { events_ = events; }

  bool wants_copies() const { return life_.state() != DeviceLife::State::kOff; }
  // The process keeps the files pinned until drop(); later processes get them, too.
  void hold(std::uint64_t copy, std::vector<UniqueFd> segments, std::vector<std::uint64_t> bytes);
  void drop(std::uint64_t copy, Pages pages = Pages::kStay);

  // Returns the worker's end of the channel. kUnavailable or kNotFound: why there is none.
  Result<UniqueFd> serve(DeviceOrder order);
  // Tiles of the session that have verified since the last call.
  void tell(std::uint64_t session, const TileRuns& runs, bool complete);
  // `gone`: the worker can no longer read its buckets, which are freed at once. A session that
  // spreads goes on spreading, and discards the bytes, until it is stopped or done.
  void end(std::uint64_t session, bool gone);

  // Rounds, for sessions that were ordered `in_round`.
  void spread(const SpreadOrder& order);
  void stop_spread(std::uint64_t session, const std::string& why);
  // DeviceEvents::meeting_id answers, also when there is no process.
  void make_meeting_id(std::uint64_t number);

  // Answers of direct reads.
  void bucket_landed(std::uint64_t session, std::size_t bucket);
  void reads_over(std::uint64_t session, const std::string& why);
  // Digests of blocks of a device's memory, as bucket::digest_blocks(). Calls `on_checked` once,
  // later. kNotFound, kUnavailable: no process serves that device. kPeerLost: it has ended.
  using OnChecked = std::function<void(Result<std::vector<Digest>> digests)>;
  void check_blocks(const std::string& device, std::vector<bucket::BlockFile> blocks,
                    OnChecked on_checked);
  // Reads the part of a block as bucket::read_block(), or writes `data` to it, unless that is
  // empty. Answers as check_blocks().
  using OnCopied = std::function<void(Result<std::string> bytes)>;
  void copy_block(const std::string& device, bucket::BlockFile block, std::string data,
                  OnCopied on_copied);
  // Names the process that serves; no two processes have the same name. "": none serves.
  std::string life() const { return life_.name(); }

  LinkStatus status() const;

 private:
  struct Held {
    std::vector<UniqueFd> segments;
    std::vector<std::uint64_t> bytes;
  };
  // While it lives, posted answers find this object.
  struct Lifetime {};

  async::Task<void> run();
  async::Task<Error> run_process();
  async::Task<std::string> reap(Child& child);
  async::Task<void> watch();
  void check(TimePoint now);
  std::vector<std::string> command() const;
  bool send(const proto::AgentToDevices& frame, std::vector<UniqueFd> descriptors = {});
  void send_hold(std::uint64_t copy, const Held& held);
  Result<void> on_frame(ipc::Frame from);
  Result<void> on_hello(const proto::DevicesHello& hello);
  void on_held(const proto::SegmentsHeld& held);
  void answer(std::function<void(DeviceEvents&)> call);
  void later(std::function<void()> call);
  Result<void> send_check(const std::string& device, std::vector<bucket::BlockFile> blocks,
                          std::uint64_t number);
  Result<void> on_checked(const proto::BlocksChecked& checked);
  Result<void> send_copy(const std::string& device, bucket::BlockFile block, std::string data,
                         std::uint64_t number);
  Result<void> on_copied(proto::BlockCopied copied);
  void refuse_spread(std::uint64_t session, Error why);
  void lose_orders(const Error& why);

  const boost::asio::any_io_executor executor_;
  const LinkOptions options_;
  DeviceEvents* events_ = nullptr;
  DeviceLife life_;
  DeviceLedger ledger_;
  std::map<std::uint64_t, Held> held_;
  std::uint64_t pinned_bytes_ = 0;
  // By the numbers of their orders.
  std::map<std::uint64_t, OnChecked> checks_;
  std::map<std::uint64_t, OnCopied> copies_;
  std::uint64_t last_check_ = 0;
  // Null: no process is connected.
  std::shared_ptr<ipc::FramedSocket> socket_;
  bool closing_ = false;
  async::Notifier closed_;
  const std::shared_ptr<Lifetime> lifetime_ = std::make_shared<Lifetime>();
  async::TaskGroup tasks_;
};

}  // namespace rekindle::device
