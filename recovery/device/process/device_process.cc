#include "recovery/device/process/device_process.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include <poll.h>

#include "proto/device.pb.h"
#include "recovery/device/device_wire.h"
#include "recovery/device/process/communicators.h"
#include "recovery/device/process/device_sessions.h"
#include "recovery/device/process/host_devices.h"
#include "recovery/device/process/pinned_copies.h"
#include "recovery/rpc/convert.h"
#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/base/worker_pool.h"
#include "src/bucket/block_digests.h"
#include "src/ipc/channel.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::device {

namespace {

// How long the report of a lost device may take to leave this process.
constexpr std::chrono::milliseconds kLastReport{500};
constexpr std::chrono::hours kNoDeadline{1};
// A GPU checks its whole memory in a fraction of a second; a double, or a GPU whose digests the
// host computes, in a minute.
constexpr std::chrono::seconds kCheckDeadline{120};
// Of a MiB. Shorter than the agent waits: after its answer, or this process's end, nothing is
// written any more.
constexpr std::chrono::seconds kCopyDeadline{5};
// A drop of idle communicators is tried again after this, while an id is being made.
constexpr std::chrono::seconds kDropAgain{1};
// Any number of tiles is fine here: the session knows how many there are.
constexpr std::uint32_t kAnyTile = 0xffff'ffff;

// Routes between the agent, the pinned copies, the sessions and the communicators. One thread.
class Process {
 public:
  Process(ipc::Channel agent, Bell bell, const DeviceProcessOptions& options)
      : agent_(std::move(agent)),
        bell_(std::move(bell)),
        options_(options),
        devices_(Devices::find(options.doubles)),
        copies_(devices_.open_first(), options.pin_threads),
        communicators_([this] { return load_collectives(); }),
        loans_(devices_, options.helpers) {}

  Result<void> run();

 private:
  Result<std::unique_ptr<bucket::Collectives>> load_collectives();
  Result<void> obey_agent();
  Result<void> send(const proto::DevicesToAgent& frame, std::vector<UniqueFd> descriptors = {});
  Result<void> say_hello();
  Result<bool> receive();
  Result<void> on_frame(const proto::AgentToDevices& frame, std::vector<UniqueFd> descriptors);
  Result<void> hold(const proto::HoldSegments& order, std::vector<UniqueFd> descriptors);
  Result<void> serve(const proto::ServeDevice& order, std::vector<UniqueFd> descriptors);
  Result<void> begin(const proto::ServeDevice& order, std::vector<UniqueFd> descriptors);
  void make_id(std::uint64_t number);
  void check_blocks(const proto::CheckBlocks& order, std::vector<UniqueFd> descriptors);
  void copy_block(const proto::CopyBlock& order, std::vector<UniqueFd> descriptors);
  std::optional<TimePoint> drop_communicators(TimePoint now);
  Result<void> report_pinned();
  Result<void> report_sessions();
  Result<void> report_end(std::uint64_t session, const SessionEnd& end);
  void wait();

  ipc::Channel agent_;
  const Bell bell_;
  const DeviceProcessOptions options_;
  Devices devices_;
  // The first device pins for all devices.
  PinnedCopies copies_;
  std::uint64_t reported_pinned_ = 0;
  std::atomic<bool> left_an_abort_ = false;
  Communicators communicators_;
  // Before the sessions, which use it.
  DeviceLoans loans_;
  Sessions sessions_{bell_};
  // Making the first id may take seconds, while pings are answered.
  WorkerPool id_maker_{"rk-meet", 1, 64};
  // The GPUs of a host are checked side by side.
  WorkerPool checkers_{"rk-check", 8, 256};
};

Result<void> Process::send(const proto::DevicesToAgent& frame, std::vector<UniqueFd> descriptors) {
  TRY_VOID(agent_.push(frame.SerializeAsString(), std::move(descriptors)));
  return agent_.send_some(steady_now());
}

Result<void> Process::say_hello() {
  proto::DevicesToAgent frame;
  auto& hello = *frame.mutable_hello();
  hello.set_problem(devices_.problem());
  for (const auto& one : devices_.all()) {
    auto& device = *hello.add_devices();
    device.set_id(one.id);
    device.set_name(one.name);
    device.set_total_bytes(one.total_bytes);
  }
  return send(frame);
}

Result<std::unique_ptr<bucket::Collectives>> Process::load_collectives() {
  const auto load = options_.collectives ? options_.collectives
                                         : Communicators::loader(options_.doubles.count > 0);
  TRY(auto loaded, load());
  return bound_aborts(std::move(loaded), options_.times.abort, [this](const Error& why) {
    log::warn("device.abort_left", "why", why);
    left_an_abort_ = true;
  });
}

Result<void> Process::run() {
  auto obeyed = obey_agent();
  // The end of the agent may also show while this process sends.
  if (!obeyed && obeyed.error().code() != ErrorCode::kPeerLost) return obeyed;
  const Error gone(ErrorCode::kPeerLost, "the agent of this host has gone");
  if (auto lost = sessions_.end_all(gone)) return fail(std::move(*lost));
  // The thread of that abort is still in NCCL, which must not be unloaded under it.
  if (left_an_abort_) return fail(ErrorCode::kTimeout, "an abort of a communicator has not ended");
  return {};
}

// Returns when the agent is gone.
Result<void> Process::obey_agent() {
  TRY_VOID(say_hello());
  for (;;) {
    TRY(const bool more, receive());
    if (!more) return {};
    TRY_VOID(report_sessions());
    TRY_VOID(report_pinned());
    TRY_VOID(agent_.send_some(steady_now()));
    TRY_VOID(agent_.check_deadline(steady_now()));
    wait();
  }
}

void Process::wait() {
  const TimePoint now = steady_now();
  TimePoint until = agent_.deadline().value_or(now + kNoDeadline);
  if (const auto look = copies_.look(now)) until = std::min(until, *look);
  if (const auto look = drop_communicators(now)) until = std::min(until, *look);
  const short send_too = agent_.wants_to_send() ? POLLOUT : 0;
  pollfd entries[] = {{agent_.fd(), static_cast<short>(POLLIN | send_too), 0},
                      {bell_.fd(), POLLIN, 0}};
  (void)::poll(entries, 2, ipc::poll_timeout_ms(now, until));
}

// False: the agent is gone.
Result<bool> Process::receive() {
  auto received = agent_.receive_frames(steady_now(), [this](ipc::Frame frame) -> Result<void> {
    proto::AgentToDevices parsed;
    if (!parsed.ParseFromString(frame.body)) {
      return fail(ErrorCode::kInvalid, "a malformed frame of {} bytes from the agent",
                  frame.body.size());
    }
    return on_frame(parsed, std::move(frame.descriptors));
  });
  if (!received && received.error().code() == ErrorCode::kPeerLost) return false;
  if (!received) return fail(std::move(received).error());
  return *received != ipc::Received::kEnd;
}

Result<void> Process::on_frame(const proto::AgentToDevices& frame,
                               std::vector<UniqueFd> descriptors) {
  switch (frame.kind_case()) {
    case proto::AgentToDevices::kHold:
      return hold(frame.hold(), std::move(descriptors));
    case proto::AgentToDevices::kDrop:
      copies_.drop(frame.drop().copy(), frame.drop().pages_gone() ? Pages::kGone : Pages::kStay,
                   steady_now());
      return {};
    case proto::AgentToDevices::kServe:
      return serve(frame.serve(), std::move(descriptors));
    case proto::AgentToDevices::kTiles: {
      TRY(const auto runs, rpc::from_proto(frame.tiles().ready(), kAnyTile));
      sessions_.tell(frame.tiles().session(), runs, frame.tiles().complete());
      return {};
    }
    case proto::AgentToDevices::kEnd:
      sessions_.end(frame.end().session(), frame.end().gone());
      return {};
    case proto::AgentToDevices::kSpread:
      sessions_.spread(frame.spread());
      return {};
    case proto::AgentToDevices::kStop:
      sessions_.stop(frame.stop().session(), frame.stop().why());
      return {};
    case proto::AgentToDevices::kLanded:
      sessions_.landed(frame.landed().session(), frame.landed().bucket());
      return {};
    case proto::AgentToDevices::kReadsOver:
      sessions_.reads_over(frame.reads_over().session(), frame.reads_over().why());
      return {};
    case proto::AgentToDevices::kMakeId:
      make_id(frame.make_id().number());
      return {};
    case proto::AgentToDevices::kCheck:
      check_blocks(frame.check(), std::move(descriptors));
      return {};
    case proto::AgentToDevices::kCopyBlock:
      copy_block(frame.copy_block(), std::move(descriptors));
      return {};
    case proto::AgentToDevices::kPing: {
      proto::DevicesToAgent answer;
      answer.mutable_pong();
      return send(answer);
    }
    default:
      return fail(ErrorCode::kInvalid, "the agent sent a message that this process does not know");
  }
}

Result<void> Process::hold(const proto::HoldSegments& order, std::vector<UniqueFd> descriptors) {
  const auto held = copies_.hold(order.copy(), std::move(descriptors),
                                 {order.bytes().begin(), order.bytes().end()}, steady_now());
  if (held) return {};
  proto::DevicesToAgent frame;
  frame.mutable_held()->set_copy(order.copy());
  frame.mutable_held()->set_problem(held.error().message());
  return send(frame);
}

Result<void> Process::report_pinned() {
  const TimePoint now = steady_now();
  for (const auto& settled : copies_.take_settled(now)) {
    proto::DevicesToAgent frame;
    auto& held = *frame.mutable_held();
    held.set_copy(settled.copy);
    held.set_pinned_bytes(copies_.pinned_bytes());
    held.set_elapsed_us(microseconds(settled.elapsed));
    held.set_problem(settled.problem);
    TRY_VOID(send(frame));
  }
  const std::uint64_t bytes = copies_.pinned_bytes();
  if (bytes == reported_pinned_) return {};
  reported_pinned_ = bytes;
  proto::DevicesToAgent frame;
  frame.mutable_pinned()->set_bytes(bytes);
  return send(frame);
}

Result<void> Process::serve(const proto::ServeDevice& order, std::vector<UniqueFd> descriptors) {
  const auto began = begin(order, std::move(descriptors));
  if (began) return {};
  SessionEnd end;
  end.error = began.error();
  return report_end(order.session(), end);
}

// Takes the last descriptor.
Result<std::vector<Digest>> take_leaves(std::uint64_t bytes, std::vector<UniqueFd>& descriptors) {
  if (descriptors.empty()) return fail(ErrorCode::kInvalid, "the digests of tiles did not come");
  const UniqueFd file = std::move(descriptors.back());
  descriptors.pop_back();
  TRY(const std::string leaves, ipc::read_sealed_memfd(file.get(), bytes));
  return parse_digests(leaves);
}

Result<void> Process::begin(const proto::ServeDevice& order, std::vector<UniqueFd> descriptors) {
  SessionOrder session;
  session.number = order.session();
  session.pinner = copies_.pinner();
  if (!devices_.contains(order.device())) {
    return fail(ErrorCode::kNotFound, "there is no device {}", order.device());
  }
  session.open = [this, id = order.device()] { return devices_.open(id); };
  if (descriptors.empty() || sessions_.contains(order.session())) {
    return fail(ErrorCode::kInvalid, "session {} comes without a socket, or again",
                order.session());
  }
  session.socket = std::move(descriptors.back());
  descriptors.pop_back();
  if (order.leaves_bytes() > 0) {
    TRY(session.leaves, take_leaves(order.leaves_bytes(), descriptors));
  }
  TRY(session.attached, parse_attached(order.attached()));
  TRY(session.segments, copies_.map(descriptors, session.attached.segment_bytes));
  // All ranks share a bucket of a round: the larger it is, the less its collectives cost.
  if (order.in_round()) session.slots.bucket_bytes = bucket::kLargestBucket;
  if (order.bucket_bytes() != 0) session.slots.bucket_bytes = order.bucket_bytes();
  session.slots.slots = options_.slots;
  session.slots.free_fraction = options_.free_fraction;
  session.times = options_.times;
  if (order.release_ms() != 0) {
    session.times.release = std::chrono::milliseconds(order.release_ms());
  }
  session.in_round = order.in_round();
  session.verify_upload = order.verify_upload();
  session.direct = order.direct();
  session.communicators = &communicators_;
  session.loans = &loans_;
  session.use = loans_.use(order.device());
  return sessions_.begin(std::move(session));
}

void Process::make_id(std::uint64_t number) {
  const auto answer = [this, number](const Result<std::string>& id) {
    proto::DevicesToAgent frame;
    *frame.mutable_id_made() = to_proto(number, id);
    sessions_.post(std::move(frame));
  };
  const bool queued = id_maker_.try_submit([this, answer] { answer(communicators_.make_id()); });
  if (!queued) answer(fail(ErrorCode::kExhausted, "too many meetings are asked for at once"));
}

// As digest_blocks().
Result<std::vector<Digest>> check(const Devices& devices, const proto::CheckBlocks& order,
                                  std::vector<UniqueFd> descriptors) {
  if (!devices.contains(order.device())) {
    return fail(ErrorCode::kNotFound, "there is no device {}", order.device());
  }
  if (descriptors.size() != static_cast<std::size_t>(order.bytes_size())) {
    return fail(ErrorCode::kInvalid, "{} descriptors came for {} blocks", descriptors.size(),
                order.bytes_size());
  }
  const bool in_part = order.offset_size() > 0;
  if (in_part &&
      (order.offset_size() != order.bytes_size() || order.length_size() != order.bytes_size())) {
    return fail(ErrorCode::kInvalid, "{} parts of {} blocks", order.offset_size(),
                order.bytes_size());
  }
  std::vector<bucket::BlockFile> blocks;
  for (int i = 0; i < order.bytes_size(); ++i) {
    blocks.push_back({std::move(descriptors[static_cast<std::size_t>(i)]), order.bytes(i),
                      in_part ? order.offset(i) : 0, in_part ? order.length(i) : 0});
  }
  TRY(bucket::Device* const device, devices.open(order.device()));
  TRY_VOID(failpoint("device.check"));
  return bucket::digest_blocks(*device, blocks, steady_now() + kCheckDeadline);
}

void Process::check_blocks(const proto::CheckBlocks& order, std::vector<UniqueFd> descriptors) {
  const auto answer = [this, number = order.number()](const Result<std::vector<Digest>>& digests,
                                                      Duration elapsed) {
    proto::DevicesToAgent frame;
    *frame.mutable_checked() = to_proto(number, digests, elapsed);
    sessions_.post(std::move(frame));
  };
  const auto files = std::make_shared<std::vector<UniqueFd>>(std::move(descriptors));
  const bool queued = checkers_.try_submit([this, answer, order, files] {
    const TimePoint begun = steady_now();
    const auto digests = check(devices_, order, std::move(*files));
    answer(digests, steady_now() - begun);
  });
  if (!queued) answer(fail(ErrorCode::kExhausted, "too many copies are being checked"), {});
}

// What was read. Empty after a write.
Result<std::string> copy(const Devices& devices, const proto::CopyBlock& order, UniqueFd block) {
  if (!devices.contains(order.device())) {
    return fail(ErrorCode::kNotFound, "there is no device {}", order.device());
  }
  const std::uint64_t bytes = order.data().empty() ? order.bytes() : order.data().size();
  if (bytes == 0) return fail(ErrorCode::kInvalid, "a copy of 0 bytes of a block");
  const bucket::BlockFile part{std::move(block), order.block_bytes(), order.offset(), bytes};
  const TimePoint deadline = steady_now() + kCopyDeadline;
  TRY(bucket::Device* const device, devices.open(order.device()));
  if (order.data().empty()) return bucket::read_block(*device, part, deadline);
  TRY_VOID(bucket::write_block(*device, part, order.data(), deadline));
  return std::string();
}

void Process::copy_block(const proto::CopyBlock& order, std::vector<UniqueFd> descriptors) {
  const auto answer = [this, number = order.number()](Result<std::string> bytes) {
    proto::DevicesToAgent frame;
    *frame.mutable_block_copied() = to_copied(number, std::move(bytes));
    sessions_.post(std::move(frame));
  };
  if (descriptors.size() != 1) {
    return answer(
        fail(ErrorCode::kInvalid, "{} descriptors came for one block", descriptors.size()));
  }
  const auto block = std::make_shared<UniqueFd>(std::move(descriptors.front()));
  const bool queued = checkers_.try_submit(
      [this, answer, order, block] { answer(copy(devices_, order, std::move(*block))); });
  if (!queued) answer(fail(ErrorCode::kExhausted, "too many copies are being checked"));
}

// Returns when to look next.
std::optional<TimePoint> Process::drop_communicators(TimePoint now) {
  const auto idle_at = communicators_.idle_at();
  if (!idle_at || now < *idle_at) return idle_at;
  (void)id_maker_.try_submit([this, now] { communicators_.drop_idle(now); });
  return now + kDropAgain;
}

Result<void> Process::report_end(std::uint64_t session, const SessionEnd& end) {
  proto::DevicesToAgent frame;
  auto& served = *frame.mutable_served();
  served.set_session(session);
  if (end.error) *served.mutable_error() = rpc::to_status(*end.error);
  served.set_buckets(end.buckets);
  served.set_bytes(end.bytes);
  served.set_elapsed_us(microseconds(end.elapsed));
  served.set_device_lost(end.device_lost);
  served.set_refilled(end.refilled);
  return send(frame);
}

Result<void> Process::report_sessions() {
  bell_.hear();
  auto news = sessions_.take();
  for (auto& [frame, descriptors] : news.frames) TRY_VOID(send(frame, std::move(descriptors)));
  for (const auto& [number, end] : news.ended) {
    TRY_VOID(report_end(number, end));
    // A helper may be the device that pins for all others.
    const auto& lost = end.device_lost ? end.error : end.helper_lost;
    if (lost) {
      const TimePoint until = steady_now() + kLastReport;
      while (agent_.wants_to_send() && steady_now() < until) {
        TRY_VOID(ipc::wait_for(agent_.fd(), POLLOUT, until));
        TRY_VOID(agent_.send_some(steady_now()));
      }
      return fail(*lost);
    }
    sessions_.bury(number);
  }
  return {};
}

}  // namespace

Result<void> run_device_process(UniqueFd socket, const DeviceProcessOptions& options) {
  TRY(auto agent, ipc::Channel::adopt(std::move(socket), ipc::kMaxFrameDescriptors));
  TRY(auto bell, Bell::create());
  auto process = std::make_unique<Process>(std::move(agent), std::move(bell), options);
  auto ran = process->run();
  if (!ran) (void)process.release();
  return ran;
}

}  // namespace rekindle::device
