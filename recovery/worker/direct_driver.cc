#include "recovery/worker/direct_driver.h"

#include <utility>

#include "recovery/device/device_wire.h"
#include "src/async/offload.h"
#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::worker {

namespace {

// As the device process computes them. Any thread.
Result<std::vector<bucket::DirectBucket>> buckets_of(const std::string& attached,
                                                     std::uint64_t bucket_bytes,
                                                     const Digest& digest) {
  TRY(const auto parsed, device::parse_attached(attached));
  TRY(const auto contents, bucket::Contents::create(parsed.tensor_set, parsed.layout, parsed.wanted,
                                                    parsed.segment_bytes));
  if (bucket::digest_of(contents) != digest) {
    return fail(ErrorCode::kInternal, "the device process has other contents than the agent");
  }
  TRY(const auto plan, bucket::Plan::create(contents, bucket_bytes));
  return bucket::direct_buckets(contents, plan);
}

}  // namespace

DirectDriver::DirectDriver(CopyHost& copies, DeviceHost& devices, DirectSessions& sessions,
                           async::TaskGroup& tasks, boost::asio::any_io_executor executor)
    : copies_(copies),
      devices_(devices),
      sessions_(sessions),
      tasks_(tasks),
      executor_(std::move(executor)) {}

std::shared_ptr<pull::DirectReads> DirectDriver::begin(SessionId session,
                                                       const std::string& device) {
  auto homes = devices_.homes_near(device);
  if (!homes) {
    if (homes.error().code() != ErrorCode::kNotFound) {
      log::info("worker.not_direct", "session", session, "device", device, "why", homes.error());
    }
    return nullptr;
  }
  Entry& entry = entries_[session];
  entry.homes = std::move(*homes);
  entry.reads = std::make_shared<pull::DirectReads>(
      executor_, pull::DirectReads::Answers{
                     .landed = [this, session](
                                   std::size_t bucket) { devices_.bucket_landed(session, bucket); },
                     .over = [this, session](const std::string& why) { over(session, why); }});
  return entry.reads;
}

void DirectDriver::hand_over(SessionId session, std::string attached) {
  const auto found = entries_.find(session);
  if (found != entries_.end()) found->second.attached = std::move(attached);
}

void DirectDriver::end(SessionId session, const std::string& why) {
  const auto found = entries_.find(session);
  if (found != entries_.end()) found->second.reads->end(why);
}

void DirectDriver::slots_offered(device::SlotsOffered offered) {
  const SessionId session = offered.session;
  const auto found = entries_.find(session);
  if (found == entries_.end()) {
    return devices_.reads_over(session, "no pull reads for the session any more");
  }
  tasks_.spawn("worker.direct_land", land(std::move(offered)));
}

// Registering the memory takes as long as the NICs need to map it.
async::Task<void> DirectDriver::land(device::SlotsOffered offered) {
  const auto found = entries_.find(offered.session);
  if (found == entries_.end()) co_return;
  const auto reads = found->second.reads;
  const std::string attached = std::move(found->second.attached);
  const std::uint64_t bytes = round_up(offered.bucket_bytes * offered.slots, kPageBytes);
  auto work = [&devices = devices_, fd = offered.memory.get(), bytes, homes = found->second.homes] {
    return devices.land_in_device(fd, bytes, homes);
  };
  auto landing = co_await async::offload(copies_.blocking_pool(), std::move(work));
  if (!landing) {
    log::warn("worker.not_direct", "session", offered.session, "why", landing.error());
    co_return reads->end(landing.error().message());
  }
  reads->offer({.landing = std::move(*landing),
                .bucket_bytes = offered.bucket_bytes,
                .slots = offered.slots,
                .buckets = [attached, size = offered.bucket_bytes, digest = offered.contents] {
                  return buckets_of(attached, size, digest);
                }});
}

void DirectDriver::bucket_wanted(const device::BucketWanted& wanted) {
  const auto found = entries_.find(wanted.session);
  if (found == entries_.end()) {
    return devices_.reads_over(wanted.session, "no pull reads for the session any more");
  }
  found->second.reads->want({wanted.bucket, wanted.slot, wanted.verified, wanted.wrong});
}

// Nothing reads into memory that is still being registered.
void DirectDriver::reads_ended(const device::ReadsEnded& ended) {
  log::info("worker.direct", "session", ended.session, "buckets", ended.buckets, "all", ended.all,
            "why", ended.why);
  sessions_.left_direct(ended.session, ended.all, ended.why);
  if (!entries_.contains(ended.session)) return devices_.reads_over(ended.session, ended.why);
  end(ended.session, ended.all ? "every bucket has verified" : ended.why);
}

void DirectDriver::device_over(SessionId session) {
  end(session, "the device is done with the session");
}

void DirectDriver::over(SessionId session, const std::string& why) {
  devices_.reads_over(session, why);
  entries_.erase(session);
}

}  // namespace rekindle::worker
