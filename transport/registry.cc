#include "transport/registry.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <utility>

#include <sys/mman.h>

#include "src/base/units.h"

namespace rekindle::transport {

SharedCounter::SharedCounter() {
  UniqueFd fd(::memfd_create("rekindle-changes", MFD_CLOEXEC));
  if (!fd || ::ftruncate(fd.get(), kPageBytes) != 0) return;
  void* page = ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (page == MAP_FAILED) return;
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  value_ = new (page) std::atomic<std::uint64_t>(0);
  page_ = page;
  fd_ = std::move(fd);
}

SharedCounter::~SharedCounter() {
  if (page_ != nullptr) ::munmap(page_, kPageBytes);
}

RegionKey SegmentRegistry::add(std::span<const std::byte> bytes, int fd, std::uint64_t fd_offset,
                               std::filesystem::path path, std::shared_ptr<const void> keep_alive) {
  const std::lock_guard observer_lock(observer_mutex_);
  std::unique_lock lock(mutex_);
  std::uint32_t index = 0;
  if (free_slots_.empty()) {
    index = static_cast<std::uint32_t>(slots_.size());
    slots_.emplace_back();
  } else {
    index = free_slots_.back();
    free_slots_.pop_back();
  }
  Slot& slot = slots_[index];
  const RegionKey key{index, ++slot.generation};
  const auto region = std::make_shared<const Region>(
      Region{key, bytes, fd, fd_offset, std::move(path), std::move(keep_alive)});
  slot.region = region;
  lock.unlock();
  if (observer_ != nullptr) observer_->region_added(region);
  return key;
}

void SegmentRegistry::observe(RegionObserver* observer) {
  const std::lock_guard observer_lock(observer_mutex_);
  observer_ = observer;
  if (observer == nullptr) return;
  std::vector<std::shared_ptr<const Region>> regions;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& slot : slots_) {
      if (slot.region) regions.push_back(slot.region);
    }
  }
  for (const auto& region : regions) observer->region_added(region);
}

Result<std::string> Server::accept(const SessionToken&, std::string_view) {
  return fail(ErrorCode::kInvalid, "transport {} has no handshake", transport());
}

void SegmentRegistry::remove(RegionKey key) {
  std::shared_ptr<const Region> last;  // released after the lock: unmapping may take long
  const std::lock_guard observer_lock(observer_mutex_);
  std::unique_lock lock(mutex_);
  if (key.region >= slots_.size()) return;
  Slot& slot = slots_[key.region];
  if (slot.generation != key.generation || !slot.region) return;
  last = std::move(slot.region);
  slot.region = nullptr;
  std::erase_if(draining_, [](const auto& entry) { return entry.second.expired(); });
  if (last.use_count() > 1) draining_.emplace(key, last);
  // A slot whose generations are used up is never handed out again.
  if (slot.generation != std::numeric_limits<std::uint32_t>::max()) {
    free_slots_.push_back(key.region);
  }
  changes_.bump();
  lock.unlock();
  if (observer_ != nullptr) observer_->region_removed(key);
}

void SegmentRegistry::admit(Session session) {
  std::sort(session.regions.begin(), session.regions.end());
  const std::lock_guard lock(mutex_);
  const SessionToken token = session.token;
  handles_.insert_or_assign(handle_of(token), token);
  sessions_.insert_or_assign(token, std::move(session));
  changes_.bump();
}

void SegmentRegistry::revoke(const SessionToken& token) {
  const std::lock_guard lock(mutex_);
  handles_.erase(handle_of(token));
  if (sessions_.erase(token) != 0) changes_.bump();
}

std::optional<Session> SegmentRegistry::find_session(const SessionToken& token) const {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(token);
  if (found == sessions_.end()) return std::nullopt;
  return found->second;
}

std::optional<SessionToken> SegmentRegistry::token_of(const SessionHandle& handle) const {
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return std::nullopt;
  return found->second;
}

std::optional<std::uint64_t> SegmentRegistry::session_rate(const SessionToken& token) const {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(token);
  if (found == sessions_.end()) return std::nullopt;
  return found->second.max_bytes_per_second;
}

Result<std::shared_ptr<const Region>> SegmentRegistry::lookup_locked(RegionKey key) const {
  if (key.region >= slots_.size() || slots_[key.region].generation != key.generation ||
      !slots_[key.region].region) {
    return fail(ErrorCode::kStale, "region {}.{} is not registered any more: look the source up",
                key.region, key.generation);
  }
  return slots_[key.region].region;
}

Result<std::shared_ptr<const Region>> SegmentRegistry::lookup(RegionKey key) const {
  const std::lock_guard lock(mutex_);
  return lookup_locked(key);
}

Result<std::shared_ptr<const Region>> SegmentRegistry::lookup(const SessionToken& token,
                                                              RegionKey key) const {
  const std::lock_guard lock(mutex_);
  const auto session = sessions_.find(token);
  if (session == sessions_.end()) {
    return fail(ErrorCode::kDenied, "this session was revoked or never admitted: ask for a grant");
  }
  TRY(auto region, lookup_locked(key));
  const auto& allowed = session->second.regions;
  if (!std::binary_search(allowed.begin(), allowed.end(), key)) {
    return fail(ErrorCode::kDenied, "{} may not read region {}.{}", session->second.puller,
                key.region, key.generation);
  }
  return region;
}

std::size_t SegmentRegistry::reader_count(RegionKey key) const {
  const std::lock_guard lock(mutex_);
  if (const auto found = draining_.find(key); found != draining_.end()) {
    return static_cast<std::size_t>(found->second.use_count());
  }
  if (auto region = lookup_locked(key)) {
    return static_cast<std::size_t>(region->use_count()) - 2;  // the slot's and this one
  }
  return 0;
}

namespace {
constexpr std::uint64_t kSmallestBurst = 16 << 10;
}

void RateLimiter::set_rate(std::uint64_t bytes_per_second) {
  const std::lock_guard lock(mutex_);
  if (rate_ == bytes_per_second) return;
  rate_ = bytes_per_second;
  burst_ = std::max<std::uint64_t>(rate_ / 100, kSmallestBurst);
  minimum_ = burst_ / 4;
  tokens_ = std::min(tokens_, static_cast<double>(burst_));
}

std::uint64_t RateLimiter::rate() const {
  const std::lock_guard lock(mutex_);
  return rate_;
}

void RateLimiter::refill(TimePoint now) {
  if (now <= last_) return;
  if (last_ != TimePoint{}) {
    tokens_ += seconds(now - last_) * static_cast<double>(rate_);
    tokens_ = std::min(tokens_, static_cast<double>(burst_));
  } else {
    tokens_ = static_cast<double>(burst_);
  }
  last_ = now;
}

std::uint64_t RateLimiter::take(std::uint64_t wanted, TimePoint now) {
  const std::lock_guard lock(mutex_);
  if (rate_ == 0) return wanted;
  refill(now);
  const auto available = static_cast<std::uint64_t>(std::max(tokens_, 0.0));
  if (available < std::min(wanted, minimum_)) return 0;
  const std::uint64_t granted = std::min(wanted, available);
  tokens_ -= static_cast<double>(granted);
  return granted;
}

void RateLimiter::give_back(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (rate_ == 0) return;
  tokens_ = std::min(tokens_ + static_cast<double>(bytes), static_cast<double>(burst_));
}

TimePoint RateLimiter::ready_at(TimePoint now) const {
  const std::lock_guard lock(mutex_);
  if (rate_ == 0) return now;
  const double missing = static_cast<double>(minimum_) - tokens_;
  if (missing <= 0) return now;
  const double wait = missing / static_cast<double>(rate_);
  return now + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(wait)) +
         std::chrono::microseconds(50);
}

}  // namespace rekindle::transport
