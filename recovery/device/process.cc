#include "recovery/device/process.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include <poll.h>

#include "proto/device.pb.h"
#include "recovery/device/bounded_collectives.h"
#include "recovery/device/communicators.h"
#include "recovery/device/devices.h"
#include "recovery/device/lingering.h"
#include "recovery/device/segment_cache.h"
#include "recovery/device/sessions.h"
#include "recovery/device/wire.h"
#include "recovery/rpc/convert.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/base/worker_pool.h"
#include "src/ipc/channel.h"
#include "src/ipc/frame.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::device {

namespace {

constexpr std::chrono::milliseconds kHoldLook{20};
constexpr std::chrono::milliseconds kLastWords{500};
constexpr std::chrono::hours kIdle{1};
constexpr std::chrono::seconds kDropAgain{1};    // while an id is being made
constexpr std::uint32_t kAnyTile = 0xffff'ffff;  // the session knows how many there are

class Process {
 public:
  Process(ipc::Channel agent, Bell bell, const DeviceProcessOptions& options)
      : agent_(std::move(agent)),
        bell_(std::move(bell)),
        options_(options),
        communicators_([this] { return load_collectives(); }) {}

  Result<void> run();

 private:
  Result<std::unique_ptr<bucket::Collectives>> load_collectives();
  Result<void> obey_agent();
  struct Hold {
    std::vector<Segment> segments;
    std::vector<UniqueFd> files;
    TimePoint began;
    bool settled = false;
  };
  Result<void> send(const proto::DevicesToAgent& frame);
  Result<void> say_hello();
  Result<bool> receive();
  Result<void> on_frame(const proto::AgentToDevices& frame, std::vector<UniqueFd> descriptors);
  Result<void> hold(const proto::HoldSegments& order, std::vector<UniqueFd> descriptors);
  void drop(const proto::DropSegments& order);
  void unpin(std::vector<Segment> segments);
  Result<void> serve(const proto::ServeDevice& order, std::vector<UniqueFd> descriptors);
  Result<void> begin(const proto::ServeDevice& order, std::vector<UniqueFd> descriptors);
  void make_id(std::uint64_t number);
  std::optional<TimePoint> drop_communicators(TimePoint now);
  Result<std::vector<Segment>> map(const std::vector<UniqueFd>& files,
                                   const std::vector<std::uint64_t>& bytes);
  Result<void> tell_held();
  Result<void> tell_pinned();
  Result<void> tell_served(std::uint64_t session, const SessionEnd& end);
  Result<void> hear_sessions();
  void wait();

  ipc::Channel agent_;
  const Bell bell_;
  const DeviceProcessOptions options_;
  Devices devices_;
  std::unique_ptr<bucket::Pinner> pinner_;  // null without devices
  std::unique_ptr<SegmentCache> cache_;
  WorkerPool unpinner_{"rk-unpin", 1, 4096};  // before the pinner goes, it is done
  std::map<std::uint64_t, Hold> holds_;
  Lingering lingering_{[this](std::vector<Segment> segments) { unpin(std::move(segments)); }};
  std::uint64_t told_pinned_ = 0;
  std::atomic<bool> left_an_abort_ = false;
  Communicators communicators_;
  Sessions sessions_{bell_};
  WorkerPool meeter_{"rk-meet", 1, 64};  // the first id may take seconds; pings are answered
};

Result<void> Process::send(const proto::DevicesToAgent& frame) {
  TRY_VOID(agent_.push(frame.SerializeAsString()));
  return agent_.send_some(steady_now());
}

Result<void> Process::say_hello() {
  devices_ = Devices::find(options_.doubles);
  // What one has pinned, all can read.
  if (bucket::Device* const first = devices_.open_first()) {
    pinner_ = std::make_unique<bucket::Pinner>(*first, options_.pin_threads);
    cache_ = std::make_unique<SegmentCache>(*pinner_);
  }
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
  // Its end may also show when something is said to it.
  if (!obeyed && obeyed.error().code() != ErrorCode::kPeerLost) return obeyed;
  const Error gone(ErrorCode::kPeerLost, "the agent of this host has gone");
  if (auto lost = sessions_.end_all(gone)) return fail(std::move(*lost));
  // Its thread is still in NCCL, which is not to be unloaded under it.
  if (left_an_abort_) return fail(ErrorCode::kTimeout, "an abort of a communicator has not ended");
  return {};
}

// Until its end.
Result<void> Process::obey_agent() {
  TRY_VOID(say_hello());
  for (;;) {
    TRY(const bool more, receive());
    if (!more) return {};
    TRY_VOID(hear_sessions());
    TRY_VOID(tell_held());
    TRY_VOID(tell_pinned());
    TRY_VOID(agent_.send_some(steady_now()));
    TRY_VOID(agent_.check_deadline(steady_now()));
    wait();
  }
}

void Process::wait() {
  const TimePoint now = steady_now();
  TimePoint until = agent_.deadline().value_or(now + kIdle);
  const bool pinning = std::ranges::any_of(holds_, [](const auto& h) { return !h.second.settled; });
  if (pinning) until = std::min(until, now + kHoldLook);
  if (const auto look = lingering_.look(now)) until = std::min(until, *look);
  if (const auto look = drop_communicators(now)) until = std::min(until, *look);
  const short send_too = agent_.wants_to_send() ? POLLOUT : 0;
  pollfd entries[] = {{agent_.fd(), static_cast<short>(POLLIN | send_too), 0},
                      {bell_.fd(), POLLIN, 0}};
  (void)::poll(entries, 2, ipc::poll_timeout_ms(now, until));
}

// False: the agent's end.
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
      drop(frame.drop());
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
    case proto::AgentToDevices::kMakeId:
      make_id(frame.make_id().number());
      return {};
    case proto::AgentToDevices::kPing: {
      proto::DevicesToAgent answer;
      answer.mutable_pong();
      return send(answer);
    }
    default:
      return fail(ErrorCode::kInvalid, "the agent says what this process does not know");
  }
}

Result<std::vector<Segment>> Process::map(const std::vector<UniqueFd>& files,
                                          const std::vector<std::uint64_t>& bytes) {
  if (files.size() != bytes.size()) {
    return fail(ErrorCode::kInvalid, "{} files for {} segments", files.size(), bytes.size());
  }
  if (cache_ == nullptr) return fail(ErrorCode::kNotFound, "there is no device here");
  std::vector<Segment> segments;
  for (std::size_t i = 0; i < files.size(); ++i) {
    TRY(auto segment, cache_->get(files[i].get(), bytes[i]));
    segments.push_back(std::move(segment));
  }
  return segments;
}

Result<void> Process::hold(const proto::HoldSegments& order, std::vector<UniqueFd> descriptors) {
  auto segments = map(descriptors, {order.bytes().begin(), order.bytes().end()});
  if (segments) {
    holds_[order.copy()] = {std::move(*segments), std::move(descriptors), steady_now(), false};
    return {};
  }
  proto::DevicesToAgent frame;
  frame.mutable_held()->set_copy(order.copy());
  frame.mutable_held()->set_problem(segments.error().message());
  return send(frame);
}

void Process::drop(const proto::DropSegments& order) {
  auto node = holds_.extract(order.copy());
  if (node.empty()) return;
  lingering_.add(std::move(node.mapped().segments), std::move(node.mapped().files), steady_now());
}

// Elsewhere: to unpin and unmap all of it takes seconds.
void Process::unpin(std::vector<Segment> segments) {
  const auto doomed = std::make_shared<std::vector<Segment>>(std::move(segments));
  unpinner_.submit([doomed] { doomed->clear(); });
}

Result<void> Process::tell_pinned() {
  const std::uint64_t bytes = pinner_ != nullptr ? pinner_->pinned_bytes() : 0;
  if (bytes == told_pinned_) return {};
  told_pinned_ = bytes;
  proto::DevicesToAgent frame;
  frame.mutable_pinned()->set_bytes(bytes);
  return send(frame);
}

Result<void> Process::tell_held() {
  for (auto& [copy, hold] : holds_) {
    if (hold.settled) continue;
    hold.settled = std::ranges::all_of(hold.segments, [this](const Segment& segment) {
      return pinner_->settled(*segment, 0, segment->bytes());
    });
    if (!hold.settled) continue;
    proto::DevicesToAgent frame;
    auto& held = *frame.mutable_held();
    held.set_copy(copy);
    held.set_pinned_bytes(pinner_->pinned_bytes());
    held.set_elapsed_us(microseconds(steady_now() - hold.began));
    for (const Segment& segment : hold.segments) {
      const auto failure = pinner_->failure(*segment);
      if (failure) held.set_problem(failure->message());
    }
    TRY_VOID(send(frame));
  }
  return {};
}

Result<void> Process::serve(const proto::ServeDevice& order, std::vector<UniqueFd> descriptors) {
  const auto began = begin(order, std::move(descriptors));
  if (began) return {};
  SessionEnd end;
  end.error = began.error();
  return tell_served(order.session(), end);
}

// The last descriptor is theirs.
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
  session.pinner = pinner_.get();
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
  TRY(session.segments, map(descriptors, session.attached.segment_bytes));
  // A round's bucket is shared by its ranks: the larger it is, the less its collectives cost.
  if (order.in_round()) session.slots.bucket_bytes = bucket::kLargestBucket;
  if (order.bucket_bytes() != 0) session.slots.bucket_bytes = order.bucket_bytes();
  session.slots.slots = options_.slots;
  session.slots.free_fraction = options_.free_fraction;
  session.times = options_.times;
  session.in_round = order.in_round();
  session.verify_upload = order.verify_upload();
  session.communicators = &communicators_;
  return sessions_.begin(std::move(session));
}

void Process::make_id(std::uint64_t number) {
  const auto answer = [this, number](const Result<std::string>& id) {
    proto::DevicesToAgent frame;
    *frame.mutable_id_made() = to_proto(number, id);
    sessions_.post(std::move(frame));
  };
  const bool queued = meeter_.try_submit([this, answer] { answer(communicators_.make_id()); });
  if (!queued) answer(fail(ErrorCode::kExhausted, "too many meetings are asked for at once"));
}

// When to look next.
std::optional<TimePoint> Process::drop_communicators(TimePoint now) {
  const auto idle_at = communicators_.idle_at();
  if (!idle_at || now < *idle_at) return idle_at;
  (void)meeter_.try_submit([this, now] { communicators_.drop_idle(now); });
  return now + kDropAgain;
}

Result<void> Process::tell_served(std::uint64_t session, const SessionEnd& end) {
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

Result<void> Process::hear_sessions() {
  bell_.hear();
  const auto news = sessions_.take();
  for (const auto& frame : news.frames) TRY_VOID(send(frame));
  for (const auto& [number, end] : news.ended) {
    TRY_VOID(tell_served(number, end));
    if (end.device_lost) {
      const TimePoint until = steady_now() + kLastWords;
      while (agent_.wants_to_send() && steady_now() < until) {
        TRY_VOID(ipc::wait_for(agent_.fd(), POLLOUT, until));
        TRY_VOID(agent_.send_some(steady_now()));
      }
      return fail(*end.error);
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
