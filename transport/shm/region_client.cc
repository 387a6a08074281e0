#include "transport/shm/region_client.h"

#include <array>
#include <cerrno>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/units.h"

namespace rekindle::transport::shm {

RegionClient::RegionClient(UniqueFd socket, const UniqueFd& counter,
                           std::shared_ptr<SourceMappings> mappings)
    : mappings_(std::move(mappings)),
      socket_(std::move(socket)),
      interrupt_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  struct stat info {};
  if (!counter || ::fstat(counter.get(), &info) != 0 ||
      info.st_size < static_cast<off_t>(kPageBytes)) {
    // Without the counter the peer is asked at every use of a region.
    return;
  }
  void* page = ::mmap(nullptr, kPageBytes, PROT_READ, MAP_SHARED, counter.get(), 0);
  if (page != MAP_FAILED) counter_page_ = page;
}

RegionClient::~RegionClient() {
  if (counter_page_ != nullptr) ::munmap(counter_page_, kPageBytes);
}

std::uint64_t RegionClient::changes() const {
  return static_cast<const std::atomic<std::uint64_t>*>(counter_page_)
      ->load(std::memory_order_acquire);
}

bool RegionClient::peer_gone() {
  if (gone_.load(std::memory_order_relaxed)) return true;
  std::byte next{};
  const ssize_t n = ::recv(socket_.get(), &next, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
    gone_.store(true, std::memory_order_relaxed);
    return true;
  }
  return false;
}

void RegionClient::close() {
  gone_.store(true, std::memory_order_relaxed);
  (void)::shutdown(socket_.get(), SHUT_RDWR);
}

void RegionClient::interrupt() {
  const std::uint64_t one = 1;
  (void)!::write(interrupt_.get(), &one, sizeof one);
}

RegionClient::Turn::Turn(RegionClient& client, TimePoint deadline) : client_(client) {
  std::unique_lock lock(client.mutex_);
  mine_ = client.turn_over_.wait_until(lock, deadline, [&] { return !client.turn_taken_; });
  if (mine_) client.turn_taken_ = true;
}

RegionClient::Turn::~Turn() {
  if (!mine_) return;
  const std::lock_guard lock(client_.mutex_);
  client_.turn_taken_ = false;
  client_.turn_over_.notify_one();
}

RegionClient::Found RegionClient::find(RegionKey key, TimePoint deadline) {
  const Turn turn(*this, deadline);
  if (!turn) return {OpStatus::kTimeout, nullptr};
  if (gone_.load(std::memory_order_relaxed)) return {OpStatus::kPeerLost, nullptr};
  // Read before asking: a change while the answer is on its way is seen the next time.
  const std::uint64_t now = counter_page_ != nullptr ? changes() : 0;
  const auto known = known_.find(key);
  if (known == known_.end()) {
    Found found = ask(key, true, deadline);
    if (found.status == OpStatus::kOk) known_.emplace(key, Known{found.mapping, now});
    return found;
  }
  if (counter_page_ != nullptr && known->second.checked_at == now) {
    return {OpStatus::kOk, known->second.mapping};
  }
  Found found = ask(key, false, deadline);
  if (found.status == OpStatus::kOk) {
    known->second.checked_at = now;
    return {OpStatus::kOk, known->second.mapping};
  }
  if (found.status == OpStatus::kStale) known_.erase(known);
  return found;
}

RegionClient::Found RegionClient::ask(RegionKey key, bool want_fd, TimePoint deadline) {
  if (out_of_step_) return {OpStatus::kTimeout, nullptr};
  RegionReply reply;
  UniqueFd fd;
  switch (exchange(RegionRequest{.key = key, .want_fd = want_fd ? 1u : 0u}, reply, fd, deadline)) {
    case Io::kDone:
      break;
    case Io::kAgain:
      out_of_step_ = true;
      return {OpStatus::kTimeout, nullptr};
    case Io::kClosed:
      gone_.store(true, std::memory_order_relaxed);
      return {OpStatus::kPeerLost, nullptr};
  }
  if (reply.key != key || reply.status > static_cast<std::uint32_t>(OpStatus::kFault)) {
    gone_.store(true, std::memory_order_relaxed);
    return {OpStatus::kPeerLost, nullptr};
  }
  const auto status = static_cast<OpStatus>(reply.status);
  if (status != OpStatus::kOk || !want_fd) return {status, nullptr};
  auto mapping = mappings_->open(fd, reply);
  if (!mapping) return {OpStatus::kFault, nullptr};
  return {OpStatus::kOk, std::move(mapping)};
}

Io RegionClient::exchange(const RegionRequest& request, RegionReply& reply, UniqueFd& fd,
                          TimePoint deadline) {
  // There is one request at a time, so the socket has room for it unless the peer is gone.
  if (send_message(socket_.get(), request) != Io::kDone) return Io::kClosed;
  while (true) {
    const Io io = receive_message(socket_.get(), reply, fd);
    if (io != Io::kAgain) return io;
    if (!wait(deadline)) return Io::kAgain;
  }
}

bool RegionClient::wait(TimePoint deadline) {
  std::array<pollfd, 2> fds{{{socket_.get(), POLLIN, 0}, {interrupt_.get(), POLLIN, 0}}};
  const Duration left = deadline - std::chrono::steady_clock::now();
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  if (ms <= 0) return false;
  const int rc = ::poll(fds.data(), fds.size(), static_cast<int>(std::min<long>(ms, 60'000)));
  return (rc >= 0 || errno == EINTR) && (fds[1].revents & POLLIN) == 0;
}

}  // namespace rekindle::transport::shm
