#include "recovery/device/link.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/socket.h>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/device/devices.h"
#include "recovery/rpc/convert.h"
#include "src/base/log.h"

namespace rekindle::device {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kLook{250};
constexpr std::chrono::milliseconds kAsk{1000};
constexpr std::chrono::milliseconds kPause{2000};
constexpr std::chrono::milliseconds kReapLook{5};
constexpr std::chrono::milliseconds kEndsByItself{2000};
constexpr std::chrono::seconds kSayAgain{30};

TimePoint clock_now() { return SteadyClock().now(); }

rpc::Task<bool> is_cancelled() {
  const auto state = co_await asio::this_coro::cancellation_state;
  co_return state.cancelled() != asio::cancellation_type::none;
}

rpc::Task<void> sleep_for(std::chrono::milliseconds pause) {  // less when cancelled
  asio::steady_timer timer(co_await asio::this_coro::executor, pause);
  boost::system::error_code woken;
  co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, woken));
}

Result<std::vector<UniqueFd>> copies_of(const std::vector<UniqueFd>& files) {
  std::vector<UniqueFd> copies;
  for (const UniqueFd& file : files) {
    UniqueFd copy(::fcntl(file.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy) return fail_errno(errno, "share a segment with the device process");
    copies.push_back(std::move(copy));
  }
  return copies;
}

}  // namespace

std::string_view to_string(LinkStatus::State state) {
  switch (state) {
    case LinkStatus::State::kOff:
      return "off";
    case LinkStatus::State::kStarting:
      return "starting";
    case LinkStatus::State::kServing:
      return "serving";
    case LinkStatus::State::kRestarting:
      return "restarting";
  }
  return "?";
}

DeviceLink::DeviceLink(asio::any_io_executor executor, LinkOptions options)
    : executor_(executor), options_(std::move(options)), tasks_(std::move(executor)) {}

void DeviceLink::start() {
  const auto use = options_.gpu.use;
  if (use == GpuOptions::Use::kNone) {
    status_.problem = "this agent was started with --gpu none";
    return;
  }
  if (use == GpuOptions::Use::kAuto && !built_with_cuda()) {
    status_.problem = "this build has no CUDA support";
    log::info("device.none", "why", status_.problem);
    return;
  }
  status_.state = LinkStatus::State::kStarting;
  running_ = true;
  tasks_.spawn("device.run", run());
  tasks_.spawn("device.look", look());
}

rpc::Task<void> DeviceLink::close(std::chrono::milliseconds deadline) {
  closing_ = true;
  const TimePoint give_up = clock_now() + deadline;
  if (connection_ != nullptr) {
    connection_->close(Error(ErrorCode::kUnavailable, "the agent of this host stops"));
  }
  while (running_ && clock_now() < give_up && !co_await is_cancelled()) {
    co_await sleep_for(kReapLook);
  }
  (void)co_await tasks_.close(std::chrono::milliseconds(500));  // a process that is left is killed
}

std::vector<std::string> DeviceLink::command() const {
  std::vector<std::string> command{options_.program, "device-process",
                                   "--fd",           std::to_string(Child::kSocket),
                                   "--release-ms",   std::to_string(options_.release.count())};
  const auto& arguments = options_.gpu.arguments;
  command.insert(command.end(), arguments.begin(), arguments.end());
  const Doubles& doubles = options_.gpu.doubles;
  if (options_.gpu.use == GpuOptions::Use::kDouble) {
    command.emplace_back("--double");
    command.push_back(fmt::format("{}:{}", doubles.count, doubles.bytes));
  }
  return command;
}

// One process after the other, until close() or until it says that there is no GPU.
rpc::Task<void> DeviceLink::run() {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto pause = options_.first_pause;
  while (!closing_) {
    Error why = co_await live();
    const bool healthy = greeted_ && clock_now() - *greeted_ >= options_.healthy;
    greeted_.reset();
    status_.pid = 0;
    status_.pinned_bytes = 0;
    lose_sessions(why);
    const bool cancelled = co_await is_cancelled();
    if (closing_ || cancelled) break;
    if (none_here_) {
      status_.state = LinkStatus::State::kOff;
      held_.clear();
      break;
    }
    if (healthy) pause = options_.first_pause;
    status_.state = LinkStatus::State::kRestarting;
    status_.problem = why.message();
    ++status_.restarts;
    log::warn("device.restart", "why", why.message(), "pause_ms", pause.count());
    co_await sleep_for(pause);
    pause = std::min(pause * 2, options_.longest_pause);
  }
  running_ = false;
}

// One life of the process; why it is over.
rpc::Task<Error> DeviceLink::live() {
  co_await asio::this_coro::throw_if_cancelled(false);
  life_began_ = clock_now();
  auto child = Child::start(command());
  if (!child) co_return std::move(child).error();
  auto channel = ipc::Channel::adopt((*child)->take_socket(), 0);
  if (!channel) co_return std::move(channel).error();
  status_.pid = static_cast<std::uint32_t>((*child)->pid());
  connection_ = std::make_shared<Connection>(executor_, std::move(*channel));
  Connection::OnFrame on_frame = [this](const std::string& body) { return this->on_frame(body); };
  Error why = co_await connection_->run(std::move(on_frame));
  connection_.reset();
  status_.state = LinkStatus::State::kRestarting;
  status_.problem = why.message();
  const std::string how = co_await reap(**child);
  // By itself, or because of what we saw: then that is the reason.
  if (why.code() == ErrorCode::kPeerLost) co_return Error(why.code(), "it " + how);
  co_return std::move(why).with_context("it " + how);
}

// A GPU process that was killed may be in its driver for long; another is not started meanwhile.
rpc::Task<std::string> DeviceLink::reap(Child& child) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const TimePoint began = clock_now();
  TimePoint say_at = began + kSayAgain;
  for (;;) {
    if (auto how = child.ended()) co_return *how;
    const bool cancelled = co_await is_cancelled();
    if (cancelled) break;
    if (clock_now() - began > kEndsByItself) child.kill();
    if (clock_now() > say_at) {
      say_at += kSayAgain;
      log::warn("device.ending", "pid", child.pid(), "why", "it was killed and is in its driver");
    }
    co_await sleep_for(kReapLook);
  }
  child.kill();
  co_return "does not end";
}

rpc::Task<void> DeviceLink::look() {
  co_await asio::this_coro::throw_if_cancelled(false);
  TimePoint last = clock_now();
  while (running_ && !closing_) {
    const TimePoint now = clock_now();
    if (now - last > kPause) heard_ = now;  // we were stopped, or starved
    last = now;
    look_once(now);
    const bool cancelled = co_await is_cancelled();
    if (cancelled) break;
    co_await sleep_for(kLook);
  }
}

// A process that hangs in a driver keeps its socket open: it is asked.
void DeviceLink::look_once(TimePoint now) {
  if (connection_ == nullptr) return;
  connection_->check(now);
  if (!greeted_) {
    if (now - life_began_ <= options_.hello) return;
    return connection_->close(Error(ErrorCode::kTimeout, "did not say which GPUs it has"));
  }
  if (now - heard_ > options_.silence) {
    return connection_->close(Error(
        ErrorCode::kTimeout, fmt::format("has not answered for {} ms: it hangs, or is stopped",
                                         options_.silence.count())));
  }
  if (now - asked_ < kAsk) return;
  asked_ = now;
  proto::AgentToDevices frame;
  frame.mutable_ping();
  (void)send(frame);
}

// False: it was not sent, and why is logged.
bool DeviceLink::send(const proto::AgentToDevices& frame, std::vector<UniqueFd> descriptors) {
  if (connection_ == nullptr) return false;
  auto sent = connection_->send(frame.SerializeAsString(), std::move(descriptors));
  if (!sent) log::warn("device.send", "error", sent.error().message());
  return sent.has_value();
}

Result<void> DeviceLink::on_frame(const std::string& body) {
  proto::DevicesToAgent frame;
  if (!frame.ParseFromString(body)) {
    return fail(ErrorCode::kInvalid, "sent a malformed frame of {} bytes", body.size());
  }
  heard_ = clock_now();
  switch (frame.kind_case()) {
    case proto::DevicesToAgent::kPong:
      return {};
    case proto::DevicesToAgent::kHello:
      return on_hello(frame.hello());
    case proto::DevicesToAgent::kHeld:
      on_held(frame.held());
      return {};
    case proto::DevicesToAgent::kPinned:
      status_.pinned_bytes = frame.pinned().bytes();
      return {};
    case proto::DevicesToAgent::kServed:
      on_served(frame.served());
      return {};
    default:
      return fail(ErrorCode::kInvalid, "says what this agent does not know");
  }
}

Result<void> DeviceLink::on_hello(const proto::DevicesHello& hello) {
  if (greeted_) return fail(ErrorCode::kInvalid, "said hello twice");
  greeted_ = clock_now();
  if (hello.devices_size() == 0) {
    // After one that had some it is a failure, which may pass.
    none_here_ = !had_devices_;
    if (none_here_) log::info("device.none", "why", hello.problem());
    return fail(ErrorCode::kUnavailable, "there is no GPU here: {}", hello.problem());
  }
  had_devices_ = true;
  status_.state = LinkStatus::State::kServing;
  if (!hello.problem().empty()) status_.problem = hello.problem();
  status_.devices.clear();
  for (const auto& device : hello.devices()) {
    status_.devices.push_back({device.id(), device.name(), device.total_bytes()});
  }
  log::info("device.ready", "pid", status_.pid, "devices", hello.devices_size(), "ms",
            milliseconds(*greeted_ - life_began_));
  for (const auto& [copy, held] : held_) send_hold(copy, held);
  return {};
}

void DeviceLink::on_held(const proto::SegmentsHeld& held) {
  if (held.problem().empty()) {
    log::info("device.held", "copy", held.copy(), "pinned_bytes", held.pinned_bytes(), "ms",
              held.elapsed_us() / 1000);
    return;
  }
  status_.problem = "not all weights are pinned: " + held.problem();
  log::warn("device.held", "copy", held.copy(), "pinned_bytes", held.pinned_bytes(), "problem",
            held.problem());
}

void DeviceLink::on_served(const proto::DeviceServed& served) {
  if (sessions_.erase(served.session()) == 0) return;  // it was ended here
  DeviceOver over;
  over.session = served.session();
  if (served.has_error()) {
    if (auto status = rpc::from_status(served.error()); !status) {
      over.error = std::move(status).error();
    }
  }
  over.buckets = served.buckets();
  over.bytes = served.bytes();
  over.elapsed = std::chrono::microseconds(served.elapsed_us());
  if (on_over_) on_over_(over);
}

void DeviceLink::lose_sessions(const Error& why) {
  const auto lost = std::exchange(sessions_, {});
  for (const std::uint64_t session : lost) {
    DeviceOver over;
    over.session = session;
    over.error = Error(ErrorCode::kPeerLost, "the device process has ended: " + why.message());
    if (on_over_) on_over_(over);
  }
}

void DeviceLink::hold(std::uint64_t copy, std::vector<UniqueFd> segments,
                      std::vector<std::uint64_t> bytes) {
  if (!wants_copies()) return;
  const auto [at, fresh] = held_.emplace(copy, Held{std::move(segments), std::move(bytes)});
  if (fresh && greeted_) send_hold(copy, at->second);
}

void DeviceLink::send_hold(std::uint64_t copy, const Held& held) {
  if (connection_ == nullptr) return;
  auto files = copies_of(held.segments);
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

void DeviceLink::drop(std::uint64_t copy) {
  if (held_.erase(copy) == 0 || connection_ == nullptr || !greeted_) return;
  proto::AgentToDevices frame;
  frame.mutable_drop()->set_copy(copy);
  (void)send(frame);
}

Result<void> DeviceLink::check_ready(const std::string& device) const {
  switch (status_.state) {
    case LinkStatus::State::kOff:
      return fail(ErrorCode::kUnavailable, "{}", status_.problem);
    case LinkStatus::State::kStarting:
      return fail(ErrorCode::kUnavailable, "the device process is being started");
    case LinkStatus::State::kRestarting:
      return fail(ErrorCode::kUnavailable, "the device process is being restarted: {}",
                  status_.problem);
    case LinkStatus::State::kServing:
      break;
  }
  std::string seen;
  for (const DeviceInfo& info : status_.devices) {
    if (info.id == device) return {};
    seen += (seen.empty() ? "" : ", ") + info.id;
  }
  return fail(ErrorCode::kNotFound, "no GPU with UUID {} is visible to the agent; it sees {}",
              device, seen);
}

Result<UniqueFd> DeviceLink::serve(DeviceOrder order) {
  TRY_VOID(check_ready(order.device));
  if (order.segments.size() + 1 > ipc::kMaxFrameDescriptors) {
    return fail(ErrorCode::kExhausted, "{} segments are too many for the device process",
                order.segments.size());
  }
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return fail_errno(errno, "make a socket for a worker's buckets");
  }
  UniqueFd workers(ends[0]);
  order.segments.emplace_back(ends[1]);
  proto::AgentToDevices frame;
  auto& serve = *frame.mutable_serve();
  serve.set_session(order.session);
  serve.set_device(order.device);
  serve.set_attached(std::move(order.attached));
  serve.set_bucket_bytes(order.bucket_bytes != 0 ? order.bucket_bytes : options_.gpu.bucket_bytes);
  TRY_VOID(connection_->send(frame.SerializeAsString(), std::move(order.segments)));
  sessions_.insert(order.session);
  return workers;
}

void DeviceLink::tell(std::uint64_t session, const bucket::TileRuns& runs, bool complete) {
  if (!sessions_.contains(session) || connection_ == nullptr) return;
  proto::AgentToDevices frame;
  auto& tiles = *frame.mutable_tiles();
  tiles.set_session(session);
  *tiles.mutable_ready() = rpc::to_proto(runs);
  tiles.set_complete(complete);
  // A session that misses tiles would wait for them for ever.
  if (!send(frame)) end(session, false);
}

void DeviceLink::end(std::uint64_t session, bool gone) {
  if (sessions_.erase(session) == 0 || connection_ == nullptr) return;
  proto::AgentToDevices frame;
  frame.mutable_end()->set_session(session);
  frame.mutable_end()->set_gone(gone);
  (void)send(frame);
}

LinkStatus DeviceLink::status() const {
  LinkStatus status = status_;
  status.sessions = sessions_.size();
  for (const auto& [copy, held] : held_) {
    for (const std::uint64_t bytes : held.bytes) status.held_bytes += bytes;
  }
  return status;
}

}  // namespace rekindle::device
