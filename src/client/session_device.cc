#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include <unistd.h>

#include "src/client/session.h"

// A session's weights on a device.
namespace rekindle::client {

namespace {

constexpr std::chrono::milliseconds kAgentPatience{1000};

// Lets the mutex go for a while: copies and waits are not its matter.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

}  // namespace

Result<void> Session::begin_device(WorkerDevice device, DeviceLoad::Source source) {
  TRY(auto load, DeviceLoad::create(std::move(device), contents_, std::move(source)));
  tensors();
  const Lock lock(inbox_->mutex);
  device_ = std::move(load);
  device_path_ = texts_.insert(device_->path()).first->c_str();
  return {};
}

Result<void> Session::check_has_device() const {
  if (device_ != nullptr) return {};
  return fail(ErrorCode::kInvalid, "this session was attached without a device: call rk_next");
}

Result<std::span<const rk_part>> Session::next_bucket(TimePoint deadline) {
  TRY_VOID(check_has_device());
  Lock lock(inbox_->mutex);
  TRY_VOID(wait_for_turn(lock, deadline));
  const Turn turn(*this);
  TRY(const auto bucket, take_bucket(lock, deadline));
  if (!bucket) return std::span<const rk_part>();
  try {
    return hand_out(*bucket);
  } catch (const std::bad_alloc&) {
    ended_ = Error(ErrorCode::kExhausted, "out of memory");  // the next call would skip the bucket
    return fail(*ended_);
  }
}

std::span<const rk_part> Session::hand_out(const FilledBucket& bucket) {
  std::vector<rk_part> parts;
  parts.reserve(bucket.parts.size());
  for (const bucket::Part& part : bucket.parts) {
    parts.push_back({&tensors_[part.piece],
                     part.offset_bytes,
                     part.bytes,
                     reinterpret_cast<void*>(static_cast<std::uintptr_t>(bucket.at + part.at)),
                     {}});
  }
  parts_.push_back(std::move(parts));
  return parts_.back();
}

// nullopt: there are no more.
Result<std::optional<FilledBucket>> Session::take_bucket(Lock& lock, TimePoint deadline) {
  while (true) {
    apply_messages();
    TRY_VOID(check_alive());
    auto bucket = look_for_bucket(lock);
    if (!bucket) ask_agent(lock, bucket.error());
    TRY_VOID(check_alive());
    if (!bucket || *bucket || device_->ended()) return bucket;
    if (SteadyClock().now() >= deadline) {
      return fail(ErrorCode::kTimeout, "no further bucket of {} yet: {} of {} tensors are whole",
                  version_.to_string(), handed_out_, contents_.pieces().size());
    }
    wait_for_device(lock, deadline, &DeviceLoad::wait);
  }
}

void Session::wait_for_device(Lock& lock, TimePoint deadline,
                              void (DeviceLoad::*until)(int, TimePoint) const) {
  const Unlocked unlocked(lock);
  (device_.get()->*until)(inbox_->wake.get(), deadline);
  std::uint64_t count;
  [[maybe_unused]] const ssize_t got = ::read(inbox_->wake.get(), &count, sizeof count);
}

// An agent that dies takes its device process with it, and either may be missed first: what counts
// is the agent. One that lives answers.
void Session::ask_agent(Lock& lock, const Error& device_error) {
  if (device_error.code() != ErrorCode::kUnavailable) return;
  Result<Message> answer;
  {
    const Unlocked unlocked(lock);
    answer = connection_->call(PingRequest{}, 0, kAgentPatience, std::make_shared<Inbox>());
  }
  if (!answer && answer.error().code() == ErrorCode::kPeerLost && !ended_) ended_ = answer.error();
}

Result<std::optional<FilledBucket>> Session::look_for_bucket(Lock& lock) {
  const DeviceLoad::Tiles arrived = std::exchange(arrived_, {});
  Result<std::optional<FilledBucket>> bucket;
  {
    const Unlocked unlocked(lock);
    TRY_VOID(device_->mark_ready(arrived));
    bucket = device_->take();
  }
  handed_out_ = device_->whole_pieces();
  device_path_ = texts_.insert(device_->path()).first->c_str();
  return bucket;
}

Result<void> Session::prefetch(std::uint64_t bytes, TimePoint deadline) {
  using Prefetched = DeviceLoad::Prefetched;
  TRY_VOID(check_has_device());
  Lock lock(inbox_->mutex);
  TRY_VOID(wait_for_turn(lock, deadline));
  const Turn turn(*this);
  while (in_line_ == 0) {
    apply_messages();
    TRY_VOID(check_alive());
    const DeviceLoad::Tiles arrived = std::exchange(arrived_, {});
    Result<Prefetched> taken = Prefetched::kNoMore;
    {
      const Unlocked unlocked(lock);
      TRY_VOID(device_->mark_ready(arrived));
      taken = device_->prefetch(bytes);
    }
    device_path_ = texts_.insert(device_->path()).first->c_str();
    if (!taken) ask_agent(lock, taken.error());
    TRY_VOID(check_alive());
    TRY(const Prefetched what, std::move(taken));
    if (what == Prefetched::kNoMore || SteadyClock().now() >= deadline) break;
    if (what == Prefetched::kNothingYet) {
      wait_for_device(lock, deadline, &DeviceLoad::wait_for_feed);
    }
  }
  return {};
}

Result<void> Session::load_into(std::span<const rk_target> targets,
                                std::chrono::milliseconds timeout) {
  TRY_VOID(check_has_device());
  Lock lock(inbox_->mutex);
  TRY_VOID(wait_for_turn(lock, SteadyClock().now() + timeout));
  const Turn turn(*this);
  TRY_VOID(device_->aim(targets));
  auto moved = move_all(lock, timeout);
  if (moved || moved.error().code() == ErrorCode::kTimeout) return moved;
  const Unlocked unlocked(lock);
  if (device_->wait_for_reads()) return moved;  // the targets are the caller's again
  return fail(moved.error().code(), "{}; the device still copies to the targets: keep them",
              moved.error().message());
}

Result<void> Session::move_all(Lock& lock, std::chrono::milliseconds timeout) {
  while (true) {
    TRY(const auto bucket, take_bucket(lock, SteadyClock().now() + timeout));
    if (!bucket) return {};  // the last one is given back when the device has read it
    const Unlocked unlocked(lock);
    TRY_VOID(device_->move(*bucket));
  }
}

}  // namespace rekindle::client
