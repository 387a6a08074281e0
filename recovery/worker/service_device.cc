// Sessions whose weights go to a device: the orders of the device process, and its words on them.
#include <span>
#include <utility>

#include <fcntl.h>

#include "recovery/worker/service.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/ipc/frame.h"

namespace rekindle::worker {

namespace {

// The digests that the device process compares a device's bytes with.
Result<void> add_leaves(const Checkpoint& checkpoint, device::DeviceOrder& order) {
  const auto bytes = std::as_bytes(std::span(checkpoint.tile_digests));
  if (bytes.empty()) return {};
  TRY(order.leaves, ipc::sealed_memfd({reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
  order.leaves_bytes = bytes.size();
  return {};
}

}  // namespace

// The worker's end of the channel that its buckets come by.
Result<UniqueFd> WorkerService::give_device(Session& session, const Supply::View& view,
                                            std::string attached) {
  device::DeviceOrder order;
  order.session = session.state.id();
  order.device = session.device;
  order.attached = std::move(attached);
  order.bucket_bytes = session.bucket_bytes;
  order.in_round = session.in_round;
  order.keep = std::make_shared<const Supply::Files>(view.files);
  for (const auto& segment : view.segments) {
    order.segments.emplace_back(::fcntl(segment.get(), F_DUPFD_CLOEXEC, 0));
    if (!order.segments.back()) return fail_errno(errno, "share a segment with the device process");
  }
  order.verify_upload = options_.verify_uploads;
  if (order.in_round || order.verify_upload) TRY_VOID(add_leaves(*view.checkpoint, order));
  TRY(auto channel, host_.serve_device(std::move(order)));
  session.on_device = true;
  return channel;
}

void WorkerService::leave_device(Session& session) {
  session.hold.reset();
  session.held.reset();
  if (!std::exchange(session.on_device, false)) return;
  const bool gone = !clients_.contains(session.client->id());
  host_.end_device(session.state.id(), gone);
}

// The worker hears of it on its own channel, and may fill its buckets itself.
void WorkerService::device_over(const device::DeviceOver& over) {
  const auto found = sessions_.find(over.session);
  const SessionPtr kept = found == sessions_.end() ? nullptr : found->second;
  if (kept != nullptr) kept->on_device = false;
  rounds_.device_over(over, steady_now());
  rounds_changed();
  if (kept == nullptr) return;
  Session& session = *kept;
  // With the buckets of a round not every tile has been here.
  if (session.in_round && !over.error) session.state.leave_round(steady_now(), true);
  retry_loaded(session);
  if (!over.error) {
    log::info("worker.device_done", "session", over.session, "device", session.device, "buckets",
              over.buckets, "bytes", over.bytes, "us", over.elapsed.count(), "verified",
              options_.verify_uploads || session.brought_by_round, "refilled", over.refilled);
    return;
  }
  log::warn("worker.device_failed", "session", over.session, "pid", session.client->pid(), "device",
            session.device, "buckets", over.buckets, "refilled", over.refilled, "why",
            over.error->message());
  note(session, "device_failed", over.error->message());
  if (over.error->code() == ErrorCode::kCorrupt && session.copy != nullptr) {
    // The copy itself may be wrong, although nothing has touched its files: nobody gets it before
    // it has been read again.
    session.copy->verification->doubt();
    (void)host_.verifier().check(session.copy);
  }
}

}  // namespace rekindle::worker
