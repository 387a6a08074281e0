#include <utility>

#include "recovery/device/link.h"
#include "recovery/device/wire.h"
#include "src/base/log.h"

// What the device process says, and its silence.
namespace rekindle::device {

Result<void> DeviceLink::on_frame(const std::string& body) {
  proto::DevicesToAgent frame;
  if (!frame.ParseFromString(body)) {
    return fail(ErrorCode::kInvalid, "sent a malformed frame of {} bytes", body.size());
  }
  heard_ = SteadyClock().now();
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
    case proto::DevicesToAgent::kJoined:
      return on_joined(frame.joined());
    case proto::DevicesToAgent::kProgress:
      on_progress(frame.progress());
      return {};
    case proto::DevicesToAgent::kSpreadOver:
      on_spread_over(frame.spread_over());
      return {};
    case proto::DevicesToAgent::kIdMade:
      on_id_made(frame.id_made());
      return {};
    default:
      return fail(ErrorCode::kInvalid, "says what this agent does not know");
  }
}

Result<void> DeviceLink::on_hello(const proto::DevicesHello& hello) {
  if (greeted_) return fail(ErrorCode::kInvalid, "said hello twice");
  greeted_ = SteadyClock().now();
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
  if (!served.device_lost()) lent_.erase(served.session());  // else when the process is gone
  if (sessions_.erase(served.session()) == 0) return;        // it was ended here
  if (events_ != nullptr) events_->device_over(from_proto(served));
}

Result<void> DeviceLink::on_joined(const proto::DeviceJoined& joined) {
  TRY(const auto words, from_proto(joined));
  if (sessions_.contains(words.session) && events_ != nullptr) events_->device_joined(words);
  return {};
}

void DeviceLink::on_progress(const proto::SpreadProgress& progress) {
  if (!spreading_.contains(progress.session()) || events_ == nullptr) return;
  events_->spread_progress(progress.session(), progress.bytes());
}

// Also of a session that was ended here: it went on so that others were not disturbed.
void DeviceLink::on_spread_over(const proto::SpreadOver& over) {
  stopping_.erase(over.session());
  if (spreading_.erase(over.session()) == 0 || events_ == nullptr) return;
  events_->spread_over(from_proto(over));
}

void DeviceLink::on_id_made(const proto::MeetingIdMade& made) {
  if (ids_.erase(made.number()) == 0 || events_ == nullptr) return;
  events_->meeting_id(made.number(), from_proto(made));
}

void DeviceLink::lose_sessions(const Error& why) {
  const Error ended(ErrorCode::kPeerLost, "the device process has ended: " + why.message());
  const auto spreading = std::exchange(spreading_, {});
  stopping_.clear();
  const auto lost = std::exchange(sessions_, {});
  const auto ids = std::exchange(ids_, {});
  if (events_ == nullptr) return;
  for (const std::uint64_t session : spreading) {
    SpreadOver over;
    over.session = session;
    over.error = ended;
    events_->spread_over(over);
  }
  for (const std::uint64_t session : lost) {
    DeviceOver over;
    over.session = session;
    over.error = ended;
    events_->device_over(over);
  }
  for (const std::uint64_t number : ids) events_->meeting_id(number, fail(ended));
}

}  // namespace rekindle::device
