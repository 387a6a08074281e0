#include "recovery/device/link.h"

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/socket.h>

#include <boost/asio/post.hpp>

#include "recovery/device/devices.h"
#include "recovery/device/wire.h"
#include "recovery/rpc/convert.h"
#include "src/base/log.h"

namespace rekindle::device {

namespace asio = boost::asio;

namespace {

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

std::vector<std::string> DeviceLink::command() const {
  std::vector<std::string> command = options_.gpu.wrapper;
  // What wraps it would take itself for /proc/self/exe.
  std::error_code unknown;
  const auto program = std::filesystem::read_symlink(options_.program, unknown);
  command.push_back(command.empty() || unknown ? options_.program : program.string());
  const std::vector<std::string> own{"device-process",
                                     "--fd",
                                     std::to_string(Child::kSocket),
                                     "--release-ms",
                                     std::to_string(options_.release.count()),
                                     "--keep-rate",
                                     std::to_string(options_.gpu.keep_bytes_per_second)};
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

// False: it was not sent, and why is logged.
bool DeviceLink::send(const proto::AgentToDevices& frame, std::vector<UniqueFd> descriptors) {
  if (connection_ == nullptr) return false;
  auto sent = connection_->send(frame.SerializeAsString(), std::move(descriptors));
  if (!sent) log::warn("device.send", "error", sent.error().message());
  return sent.has_value();
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
  serve.set_in_round(order.in_round);
  serve.set_leaves_bytes(order.leaves_bytes);
  serve.set_verify_upload(order.verify_upload);
  TRY_VOID(connection_->send(frame.SerializeAsString(), std::move(order.segments)));
  sessions_.insert(order.session);
  lent_[order.session] = std::move(order.keep);
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

// Not from within the caller's call: it may be amid a change of its own.
void DeviceLink::answer(std::function<void(DeviceEvents&)> words) {
  asio::post(executor_, [this, alive = std::weak_ptr(alive_), words = std::move(words)] {
    if (!alive.expired() && events_ != nullptr) words(*events_);
  });
}

void DeviceLink::answer_spread(std::uint64_t session, Error why) {
  SpreadOver over;
  over.session = session;
  over.error = std::move(why);
  answer([over = std::move(over)](DeviceEvents& events) { events.spread_over(over); });
}

void DeviceLink::spread(const SpreadOrder& order) {
  if (spreading_.contains(order.session)) {
    log::warn("device.spread_again", "session", order.session);
    return;
  }
  if (!sessions_.contains(order.session)) {
    return answer_spread(
        order.session, Error(ErrorCode::kNotFound,
                             fmt::format("the device has no session {} any more", order.session)));
  }
  proto::AgentToDevices frame;
  *frame.mutable_spread() = to_proto(order);
  if (!send(frame)) {
    return answer_spread(order.session, Error(ErrorCode::kUnavailable,
                                              "the device process cannot be told to spread"));
  }
  spreading_.insert(order.session);
}

void DeviceLink::stop_spread(std::uint64_t session, const std::string& why) {
  if (!sessions_.contains(session) && !spreading_.contains(session)) return;
  if (spreading_.contains(session)) stopping_.try_emplace(session, SteadyClock().now());
  proto::AgentToDevices frame;
  frame.mutable_stop()->set_session(session);
  frame.mutable_stop()->set_why(why);
  (void)send(frame);
}

void DeviceLink::make_meeting_id(std::uint64_t number) {
  proto::AgentToDevices frame;
  frame.mutable_make_id()->set_number(number);
  if (status_.state == LinkStatus::State::kServing && send(frame)) {
    ids_.insert(number);
    return;
  }
  answer([number](DeviceEvents& events) {
    events.meeting_id(number, fail(ErrorCode::kUnavailable, "no device process runs here"));
  });
}

std::string DeviceLink::life() const {
  if (status_.state != LinkStatus::State::kServing) return {};
  return fmt::format("{}.{}", status_.pid, status_.restarts);
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
