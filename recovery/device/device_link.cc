#include "recovery/device/device_link.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include <sys/socket.h>

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/device/device_wire.h"
#include "recovery/rpc/convert.h"
#include "src/base/duplicate_fd.h"
#include "src/base/log.h"

namespace rekindle::device {

namespace asio = boost::asio;

namespace {

// The slots of a session.
constexpr std::size_t kMostDescriptors = 1;
constexpr std::chrono::milliseconds kCheckInterval{250};
// A longer gap between two checks is a stop of this process.
constexpr std::chrono::milliseconds kStopped{2000};
// How long a process that has lost its socket may take to end by itself.
constexpr std::chrono::milliseconds kEndsByItself{2000};
constexpr std::chrono::seconds kLogAgain{30};
constexpr std::chrono::milliseconds kKillDeadline{500};

}  // namespace

DeviceLink::DeviceLink(asio::any_io_executor executor, LinkOptions options)
    : executor_(executor),
      options_(std::move(options)),
      life_(options_.life),
      closed_(executor),
      tasks_(std::move(executor)) {}

void DeviceLink::start() {
  const auto use = options_.gpu.use;
  if (use == GpuOptions::Use::kNone) {
    return life_.turn_off("this agent was started with --gpu none");
  }
  if (use == GpuOptions::Use::kAuto && !built_with_cuda()) {
    life_.turn_off("this build has no CUDA support");
    log::info("device.none", "why", life_.problem());
    return;
  }
  life_.start();
  tasks_.spawn("device.run", run());
  tasks_.spawn("device.watch", watch());
}

async::Task<void> DeviceLink::close(std::chrono::milliseconds deadline) {
  closing_ = true;
  closed_.notify();
  if (socket_ != nullptr) {
    socket_->close(Error(ErrorCode::kUnavailable, "the agent of this host stops"));
  }
  (void)co_await tasks_.join(deadline);
  // A process that still runs is killed.
  (void)co_await tasks_.close(kKillDeadline);
}

// --- the process

// Runs one process after the other, until close() or until there is no GPU.
async::Task<void> DeviceLink::run() {
  co_await asio::this_coro::throw_if_cancelled(false);
  while (!closing_) {
    const Error why = co_await run_process();
    const auto pause = life_.ended(steady_now(), why);
    pinned_bytes_ = 0;
    lose_orders(why);
    const bool cancelled = co_await async::is_cancelled();
    if (closing_ || cancelled) break;
    if (!pause) {
      log::info("device.none", "why", life_.problem());
      held_.clear();
      break;
    }
    log::warn("device.restart", "why", why.message(), "pause_ms", pause->count());
    co_await closed_.wait_until(steady_now() + *pause);
  }
}

// Returns why the process has ended.
async::Task<Error> DeviceLink::run_process() {
  co_await asio::this_coro::throw_if_cancelled(false);
  life_.launching(steady_now());
  auto child = Child::start(command());
  if (!child) co_return std::move(child).error();
  auto channel = ipc::Channel::adopt((*child)->take_socket(), kMostDescriptors);
  if (!channel) co_return std::move(channel).error();
  life_.launched(static_cast<std::uint32_t>((*child)->pid()));
  socket_ = std::make_shared<ipc::FramedSocket>(
      executor_, std::move(*channel), ipc::FramedSocketOptions{.max_queued_bytes = 64u << 20});
  ipc::FramedSocket::OnFrame on_frame = [this](ipc::Frame frame) {
    return this->on_frame(std::move(frame));
  };
  Error why = co_await socket_->run(std::move(on_frame));
  socket_.reset();
  life_.disconnected(why);
  const std::string how = co_await reap(**child);
  // If the process ended by itself, how it ended is the reason; else the agent's own reason counts.
  if (why.code() == ErrorCode::kPeerLost) co_return Error(why.code(), "it " + how);
  co_return std::move(why).with_context("it " + how);
}

// A killed process may stay in its driver for long, and its GPU may use what it was lent until the
// process is gone. No other process is started meanwhile.
async::Task<std::string> DeviceLink::reap(Child& child) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const TimePoint kill_at = steady_now() + kEndsByItself;
  TimePoint log_at = steady_now() + kLogAgain;
  for (;;) {
    if (auto how = child.ended()) {
      ledger_.reaped();
      co_return *how;
    }
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled) break;
    const TimePoint now = steady_now();
    if (now >= kill_at) child.kill();
    if (now >= log_at) {
      log_at = now + kLogAgain;
      log::warn("device.ending", "pid", child.pid(), "why", "it was killed and is in its driver");
    }
    co_await child.wait_ended(now < kill_at ? kill_at : log_at);
  }
  child.kill();
  co_return "does not end";
}

std::vector<std::string> DeviceLink::command() const {
  std::vector<std::string> command = options_.gpu.wrapper;
  // A wrapper would take /proc/self/exe for itself, so it gets the real path.
  std::error_code unknown;
  const auto program = std::filesystem::read_symlink(options_.program, unknown);
  command.push_back(command.empty() || unknown ? options_.program : program.string());
  const std::vector<std::string> own{"device-process",
                                     "--fd",
                                     std::to_string(Child::kSocket),
                                     "--keep-rate",
                                     std::to_string(options_.gpu.keep_bytes_per_second),
                                     "--helpers",
                                     std::to_string(options_.gpu.helpers)};
  command.insert(command.end(), own.begin(), own.end());
  const auto& arguments = options_.gpu.arguments;
  command.insert(command.end(), arguments.begin(), arguments.end());
  const Doubles& doubles = options_.gpu.doubles;
  if (options_.gpu.use == GpuOptions::Use::kDouble) {
    command.emplace_back("--double");
    command.push_back(fmt::format("{}:{}", doubles.count, doubles.bytes));
  }
  return command;
}

async::Task<void> DeviceLink::watch() {
  co_await asio::this_coro::throw_if_cancelled(false);
  TimePoint last = steady_now();
  while (!closing_ && wants_copies()) {
    const TimePoint now = steady_now();
    if (now - last > kStopped) {
      life_.excuse(now);
      ledger_.excuse(now);
    }
    last = now;
    check(now);
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled) break;
    co_await closed_.wait_until(now + kCheckInterval);
  }
}

void DeviceLink::check(TimePoint now) {
  if (socket_ == nullptr) return;
  socket_->check(now);
  auto check = life_.check(now);
  if (check.hangs) return socket_->close(std::move(*check.hangs));
  // Such a process may still write to a copy that is to be fetched, so its end is awaited.
  if (ledger_.overdue(now, options_.stop)) {
    return socket_->close(Error(
        ErrorCode::kTimeout,
        fmt::format("has not ended a round in {} ms: its device hangs", options_.stop.count())));
  }
  if (!check.ask) return;
  proto::AgentToDevices frame;
  frame.mutable_ping();
  (void)send(frame);
}

// --- orders

// Logs why a frame could not be sent, and returns false.
bool DeviceLink::send(const proto::AgentToDevices& frame, std::vector<UniqueFd> descriptors) {
  if (socket_ == nullptr) return false;
  auto sent = socket_->send(frame.SerializeAsString(), std::move(descriptors));
  if (!sent) log::warn("device.send", "error", sent.error().message());
  return sent.has_value();
}

void DeviceLink::hold(std::uint64_t copy, std::vector<UniqueFd> segments,
                      std::vector<std::uint64_t> bytes) {
  if (!wants_copies()) return;
  const auto [at, fresh] = held_.emplace(copy, Held{std::move(segments), std::move(bytes)});
  if (fresh && life_.has_greeted()) send_hold(copy, at->second);
}

void DeviceLink::send_hold(std::uint64_t copy, const Held& held) {
  if (socket_ == nullptr) return;
  auto files = duplicate_all(held.segments, "share a segment with the device process");
  if (!files || files->size() > ipc::kMaxFrameDescriptors) {
    log::warn("device.hold", "copy", copy, "error",
              files ? "it has too many segments" : files.error().message());
    return;
  }
  proto::AgentToDevices frame;
  frame.mutable_hold()->set_copy(copy);
  for (const std::uint64_t size : held.bytes) frame.mutable_hold()->add_bytes(size);
  (void)send(frame, std::move(*files));
}

void DeviceLink::drop(std::uint64_t copy, Pages pages) {
  if (held_.erase(copy) == 0 || !life_.has_greeted()) return;
  proto::AgentToDevices frame;
  frame.mutable_drop()->set_copy(copy);
  frame.mutable_drop()->set_pages_gone(pages == Pages::kGone);
  (void)send(frame);
}

Result<UniqueFd> DeviceLink::serve(DeviceOrder order) {
  TRY_VOID(life_.check_ready(order.device));
  if (order.segments.size() + 2 > ipc::kMaxFrameDescriptors) {
    return fail(ErrorCode::kExhausted, "{} segments are too many for the device process",
                order.segments.size());
  }
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return fail_errno(errno, "make a socket for a worker's buckets");
  }
  UniqueFd workers(ends[0]);
  if (order.leaves) order.segments.push_back(std::move(order.leaves));
  order.segments.emplace_back(ends[1]);
  proto::AgentToDevices frame;
  auto& serve = *frame.mutable_serve();
  serve.set_session(order.session);
  serve.set_device(order.device);
  serve.set_attached(std::move(order.attached));
  serve.set_bucket_bytes(order.bucket_bytes != 0 ? order.bucket_bytes : options_.gpu.bucket_bytes);
  serve.set_release_ms(static_cast<std::uint64_t>(order.release.count()));
  serve.set_in_round(order.in_round);
  serve.set_leaves_bytes(order.leaves_bytes);
  serve.set_verify_upload(order.verify_upload);
  serve.set_direct(order.direct);
  TRY_VOID(socket_->send(frame.SerializeAsString(), std::move(order.segments)));
  ledger_.begin(order.session, std::move(order.keep));
  return workers;
}

void DeviceLink::tell(std::uint64_t session, const TileRuns& runs, bool complete) {
  // A session whose worker is gone goes on spreading, and may still lack tiles of its share.
  const bool listens = ledger_.is_open(session) || ledger_.is_spreading(session);
  if (!listens || socket_ == nullptr) return;
  proto::AgentToDevices frame;
  auto& tiles = *frame.mutable_tiles();
  tiles.set_session(session);
  *tiles.mutable_ready() = rpc::to_proto(runs);
  tiles.set_complete(complete);
  // A session that misses tiles would wait for them for ever.
  if (!send(frame)) end(session, false);
}

void DeviceLink::end(std::uint64_t session, bool gone) {
  if (!ledger_.end(session)) return;
  proto::AgentToDevices frame;
  frame.mutable_end()->set_session(session);
  frame.mutable_end()->set_gone(gone);
  (void)send(frame);
}

void DeviceLink::spread(const SpreadOrder& order) {
  if (ledger_.is_spreading(order.session)) {
    log::warn("device.spread_again", "session", order.session);
    return;
  }
  if (!ledger_.is_open(order.session)) {
    return refuse_spread(
        order.session, Error(ErrorCode::kNotFound,
                             fmt::format("the device has no session {} any more", order.session)));
  }
  proto::AgentToDevices frame;
  *frame.mutable_spread() = to_proto(order);
  if (!send(frame)) {
    return refuse_spread(order.session, Error(ErrorCode::kUnavailable,
                                              "the device process cannot be told to spread"));
  }
  ledger_.spread(order.session);
}

void DeviceLink::stop_spread(std::uint64_t session, const std::string& why) {
  if (!ledger_.stop(session, steady_now())) return;
  proto::AgentToDevices frame;
  frame.mutable_stop()->set_session(session);
  frame.mutable_stop()->set_why(why);
  (void)send(frame);
}

void DeviceLink::make_meeting_id(std::uint64_t number) {
  proto::AgentToDevices frame;
  frame.mutable_make_id()->set_number(number);
  if (life_.state() == DeviceLife::State::kServing && send(frame)) {
    return ledger_.ask_for_id(number);
  }
  answer([number](DeviceEvents& events) {
    events.meeting_id(number, fail(ErrorCode::kUnavailable, "no device process runs here"));
  });
}

void DeviceLink::bucket_landed(std::uint64_t session, std::size_t bucket) {
  proto::AgentToDevices frame;
  frame.mutable_landed()->set_session(session);
  frame.mutable_landed()->set_bucket(bucket);
  (void)send(frame);
}

void DeviceLink::reads_over(std::uint64_t session, const std::string& why) {
  proto::AgentToDevices frame;
  frame.mutable_reads_over()->set_session(session);
  frame.mutable_reads_over()->set_why(why);
  (void)send(frame);
}

// Posted, because the caller may be in the middle of a change.
void DeviceLink::later(std::function<void()> call) {
  asio::post(executor_, [lifetime = std::weak_ptr(lifetime_), call = std::move(call)] {
    if (!lifetime.expired()) call();
  });
}

void DeviceLink::answer(std::function<void(DeviceEvents&)> call) {
  later([this, call = std::move(call)] {
    if (events_ != nullptr) call(*events_);
  });
}

void DeviceLink::check_blocks(const std::string& device, std::vector<bucket::BlockFile> blocks,
                              OnChecked on_checked) {
  const std::uint64_t number = ++last_check_;
  if (auto sent = send_check(device, std::move(blocks), number); !sent) {
    return later([on_checked = std::move(on_checked), why = std::move(sent).error()] {
      on_checked(fail(why));
    });
  }
  checks_[number] = std::move(on_checked);
}

Result<void> DeviceLink::send_check(const std::string& device,
                                    std::vector<bucket::BlockFile> blocks, std::uint64_t number) {
  TRY_VOID(life_.check_ready(device));
  if (blocks.size() > ipc::kMaxFrameDescriptors) {
    return fail(ErrorCode::kExhausted, "{} blocks are too many for the device process",
                blocks.size());
  }
  proto::AgentToDevices frame;
  auto& check = *frame.mutable_check();
  check.set_number(number);
  check.set_device(device);
  std::vector<UniqueFd> descriptors;
  for (bucket::BlockFile& block : blocks) {
    check.add_bytes(block.bytes);
    descriptors.push_back(std::move(block.descriptor));
  }
  return socket_->send(frame.SerializeAsString(), std::move(descriptors));
}

Result<void> DeviceLink::on_checked(const proto::BlocksChecked& checked) {
  auto found = checks_.extract(checked.number());
  if (found.empty()) return {};
  auto digests = from_proto(checked);
  const bool hangs = !digests && digests.error().code() == ErrorCode::kTimeout;
  found.mapped()(std::move(digests));
  // The work may never end, and its thread waits for it.
  if (hangs) return fail(ErrorCode::kTimeout, "hangs in a check of a resident copy");
  return {};
}

void DeviceLink::refuse_spread(std::uint64_t session, Error why) {
  SpreadOver over;
  over.session = session;
  over.error = std::move(why);
  answer([over = std::move(over)](DeviceEvents& events) { events.spread_over(over); });
}

// --- what the process says

Result<void> DeviceLink::on_frame(ipc::Frame from) {
  proto::DevicesToAgent frame;
  if (!frame.ParseFromString(from.body)) {
    return fail(ErrorCode::kInvalid, "sent a malformed frame of {} bytes", from.body.size());
  }
  life_.heard(steady_now());
  switch (frame.kind_case()) {
    case proto::DevicesToAgent::kPong:
      return {};
    case proto::DevicesToAgent::kHello:
      return on_hello(frame.hello());
    case proto::DevicesToAgent::kHeld:
      on_held(frame.held());
      return {};
    case proto::DevicesToAgent::kPinned:
      pinned_bytes_ = frame.pinned().bytes();
      return {};
    case proto::DevicesToAgent::kServed: {
      const auto& served = frame.served();
      const bool was_open = ledger_.over(served.session(), served.device_lost());
      if (was_open && events_ != nullptr) events_->device_over(from_proto(served));
      return {};
    }
    case proto::DevicesToAgent::kJoined: {
      TRY(const auto joined, from_proto(frame.joined()));
      const bool is_open = ledger_.is_open(joined.session);
      if (is_open && events_ != nullptr) events_->device_joined(joined);
      return {};
    }
    case proto::DevicesToAgent::kShareWanted: {
      TRY(const auto wanted, from_proto(frame.share_wanted()));
      const bool spreads = ledger_.is_spreading(wanted.session);
      if (spreads && events_ != nullptr) events_->share_wanted(wanted);
      return {};
    }
    case proto::DevicesToAgent::kProgress: {
      const auto& progress = frame.progress();
      const bool spreads = ledger_.is_spreading(progress.session());
      if (spreads && events_ != nullptr) {
        events_->spread_progress(progress.session(), progress.bytes());
      }
      return {};
    }
    case proto::DevicesToAgent::kSpreadOver: {
      const bool was_spreading = ledger_.spread_over(frame.spread_over().session());
      if (was_spreading && events_ != nullptr) {
        events_->spread_over(from_proto(frame.spread_over()));
      }
      return {};
    }
    case proto::DevicesToAgent::kSlots: {
      UniqueFd memory;
      if (!from.descriptors.empty()) memory = std::move(from.descriptors.front());
      TRY(auto offered, from_proto(frame.slots(), std::move(memory)));
      if (events_ != nullptr) events_->slots_offered(std::move(offered));
      return {};
    }
    case proto::DevicesToAgent::kWanted: {
      TRY(const auto wanted, from_proto(frame.wanted()));
      if (events_ != nullptr) events_->bucket_wanted(wanted);
      return {};
    }
    case proto::DevicesToAgent::kReadsEnded:
      if (events_ != nullptr) events_->reads_ended(from_proto(frame.reads_ended()));
      return {};
    case proto::DevicesToAgent::kIdMade: {
      const auto& made = frame.id_made();
      const bool was_asked = ledger_.id_made(made.number());
      if (was_asked && events_ != nullptr) events_->meeting_id(made.number(), from_proto(made));
      return {};
    }
    case proto::DevicesToAgent::kChecked:
      return on_checked(frame.checked());
    default:
      return fail(ErrorCode::kInvalid, "sent a message that this agent does not know");
  }
}

Result<void> DeviceLink::on_hello(const proto::DevicesHello& hello) {
  std::vector<DeviceInfo> devices;
  for (const auto& device : hello.devices()) {
    devices.push_back({device.id(), device.name(), device.total_bytes()});
  }
  const TimePoint now = steady_now();
  TRY_VOID(life_.greeted(now, std::move(devices), hello.problem()));
  log::info("device.ready", "pid", life_.pid(), "devices", hello.devices_size(), "ms",
            milliseconds(life_.since_launch(now)));
  for (const auto& [copy, held] : held_) send_hold(copy, held);
  return {};
}

void DeviceLink::on_held(const proto::SegmentsHeld& held) {
  if (held.problem().empty()) {
    log::info("device.held", "copy", held.copy(), "pinned_bytes", held.pinned_bytes(), "ms",
              held.elapsed_us() / 1000);
    return;
  }
  life_.note_problem("not all weights are pinned: " + held.problem());
  log::warn("device.held", "copy", held.copy(), "pinned_bytes", held.pinned_bytes(), "problem",
            held.problem());
}

void DeviceLink::lose_orders(const Error& why) {
  const Error ended(ErrorCode::kPeerLost, "the device process has ended: " + why.message());
  for (auto& [number, on_checked] : std::exchange(checks_, {})) on_checked(fail(ended));
  const auto lost = ledger_.lose_all();
  if (events_ == nullptr) return;
  for (const std::uint64_t session : lost.spreads) {
    SpreadOver over;
    over.session = session;
    over.error = ended;
    events_->spread_over(over);
  }
  for (const std::uint64_t session : lost.sessions) {
    DeviceOver over;
    over.session = session;
    over.error = ended;
    events_->device_over(over);
  }
  for (const std::uint64_t number : lost.ids) events_->meeting_id(number, fail(ended));
}

LinkStatus DeviceLink::status() const {
  LinkStatus status;
  status.state = life_.state();
  status.devices = life_.devices();
  for (const auto& [copy, held] : held_) {
    for (const std::uint64_t bytes : held.bytes) status.held_bytes += bytes;
  }
  status.pinned_bytes = pinned_bytes_;
  status.sessions = ledger_.open_sessions();
  status.restarts = life_.restarts();
  status.pid = life_.pid();
  status.problem = life_.problem();
  return status;
}

}  // namespace rekindle::device
