#include "transport/tcp/sender.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "src/base/units.h"
#include "src/store/fault_guard.h"

namespace rekindle::transport::tcp {
namespace {

// Below this size, one sendmsg with header and payload is faster than send and sendfile.
constexpr std::uint64_t kSendfileBytes = 32 << 10;
constexpr std::size_t kMaxSendIovecs = 256;

// Whether the file still holds the wanted range. The mapping alone cannot tell.
bool file_covers(const Region& region, std::uint64_t end) {
  if (region.fd < 0) return true;
  struct stat info {};
  if (::fstat(region.fd, &info) != 0) return false;
  if (!S_ISREG(info.st_mode)) return true;
  return in_range(region.fd_offset, end, static_cast<std::uint64_t>(info.st_size));
}

}  // namespace

void Sender::start(const Request& request, std::shared_ptr<const Region> region) {
  if (!fits(request.range, region->bytes.size()))
    return start_error(request.wr_id, OpStatus::kInvalid);
  const std::uint64_t total = *payload_bytes(request.range.run_bytes, request.range.count);
  if (total != 0 && !file_covers(*region, end_of(request.range))) {
    return start_error(request.wr_id, OpStatus::kFault);
  }
  encode(Response{request.wr_id, OpStatus::kOk, total}, header_);
  header_sent_ = 0;
  range_ = request.range;
  if (range_.count > 1 && range_.stride == range_.run_bytes) {  // really one run
    range_.run_bytes = total;
    range_.count = 1;
  }
  region_ = std::move(region);
  run_ = 0;
  run_sent_ = 0;
  payload_left_ = total;
  active_ = true;
}

void Sender::start_error(std::uint64_t wr_id, OpStatus status) {
  encode(Response{wr_id, status, 0}, header_);
  header_sent_ = 0;
  payload_left_ = 0;
  active_ = true;
}

void Sender::use_tls(DataTls& tls) {
  if (tls.kernel_sends()) return;
  tls_ = &tls;
  record_.resize(DataTls::kRecordBytes);
}

bool Sender::all_out() const {
  return header_sent_ == header_.size() && payload_left_ == 0 && record_begin_ == record_end_;
}

bool Sender::by_file() const {
  return from_ == From::kFile && region_ && region_->fd >= 0 && range_.run_bytes >= kSendfileBytes;
}

Sender::Sent Sender::send(int socket, std::uint64_t budget, bool more) {
  Sent sum;
  while (true) {
    const Sent sent = step(socket, budget - sum.payload, more);
    sum.payload += sent.payload;
    sum.outcome = sent.outcome;
    if (sent.outcome != Outcome::kDone) return sum;
    if (all_out()) {
      region_.reset();
      active_ = false;
      return sum;
    }
    if (header_sent_ == header_.size() && sum.payload == budget) {
      sum.outcome = Outcome::kBudget;
      return sum;
    }
  }
}

Sender::Sent Sender::step(int socket, std::uint64_t budget, bool more) {
  if (tls_ != nullptr) return send_sealed(budget);
  if (payload_left_ == 0 || !by_file()) return send_gathered(socket, budget, more);
  if (header_sent_ < header_.size()) return send_header(socket);
  return send_file(socket, budget);
}

Sender::Sent Sender::send_header(int socket) {
  const ssize_t n = ::send(socket, header_.data() + header_sent_, header_.size() - header_sent_,
                           MSG_DONTWAIT | MSG_NOSIGNAL | MSG_MORE);
  if (n < 0) return failed(errno, "send");
  header_sent_ += static_cast<std::size_t>(n);
  return {};
}

Sender::Sent Sender::send_file(int socket, std::uint64_t budget) {
  auto offset =
      static_cast<off_t>(region_->fd_offset + range_.offset + run_ * range_.stride + run_sent_);
  const std::uint64_t wanted = std::min(range_.run_bytes - run_sent_, budget);
  const ssize_t n = ::sendfile(socket, region_->fd, &offset, wanted);
  if (n < 0) return failed(errno, "sendfile");
  if (n == 0) return broken("the file ends before the bytes that were promised");
  advance(static_cast<std::uint64_t>(n));
  return {Outcome::kDone, static_cast<std::uint64_t>(n)};
}

Sender::Sent Sender::send_gathered(int socket, std::uint64_t budget, bool more) {
  std::array<iovec, kMaxSendIovecs> parts;
  std::size_t used = 0;
  const std::size_t header_left = header_.size() - header_sent_;
  if (header_left != 0) parts[used++] = {header_.data() + header_sent_, header_left};

  std::uint64_t planned = 0;
  std::uint64_t run = run_;
  std::uint64_t skip = run_sent_;
  const std::uint64_t limit = std::min(payload_left_, budget);
  while (planned < limit && used < parts.size()) {
    const std::uint64_t size = std::min(range_.run_bytes - skip, limit - planned);
    const std::byte* from = region_->bytes.data() + range_.offset + run * range_.stride + skip;
    parts[used++] = {const_cast<std::byte*>(from), size};
    planned += size;
    ++run;
    skip = 0;
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = used;
  const bool last = planned == payload_left_;
  const int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (more || !last ? MSG_MORE : 0);
  const ssize_t n = ::sendmsg(socket, &message, flags);
  if (n < 0) return failed(errno, "sendmsg");
  const auto moved = static_cast<std::size_t>(n);
  const std::size_t of_header = std::min(moved, header_left);
  header_sent_ += of_header;
  advance(moved - of_header);
  return {Outcome::kDone, moved - of_header};
}

Sender::Sent Sender::send_sealed(std::uint64_t budget) {
  Sent sent;
  if (record_begin_ == record_end_) {
    const std::size_t of_header = header_.size() - header_sent_;
    std::memcpy(record_.data(), header_.data() + header_sent_, of_header);
    const std::uint64_t room =
        std::min({std::uint64_t{record_.size() - of_header}, payload_left_, budget});
    const auto copied = copy_payload(std::span(record_).subspan(of_header, room));
    if (!copied) return broken("the file ends before the bytes that were promised");
    header_sent_ = header_.size();
    advance(*copied);
    sent.payload = *copied;
    record_begin_ = 0;
    record_end_ = of_header + *copied;
  }
  while (record_begin_ != record_end_) {
    const ssize_t n =
        tls_->send(std::span(record_).subspan(record_begin_, record_end_ - record_begin_));
    if (n < 0) {
      sent.outcome = failed(errno, "TLS").outcome;
      if (sent.outcome == Outcome::kDone) continue;
      return sent;
    }
    record_begin_ += static_cast<std::size_t>(n);
  }
  return sent;
}

// By pread, as an access to the mapping of a file that was cut short would be a SIGBUS.
std::optional<std::uint64_t> Sender::copy_payload(std::span<std::byte> into) const {
  std::uint64_t run = run_;
  std::uint64_t skip = run_sent_;
  std::uint64_t copied = 0;
  while (copied < into.size()) {
    const std::uint64_t offset = range_.offset + run * range_.stride + skip;
    const std::uint64_t size = std::min(range_.run_bytes - skip, into.size() - copied);
    if (!copy_run(offset, into.subspan(copied, size))) return std::nullopt;
    copied += size;
    ++run;
    skip = 0;
  }
  return copied;
}

bool Sender::copy_run(std::uint64_t offset, std::span<std::byte> into) const {
  if (region_->fd >= 0) {
    const auto at = static_cast<off_t>(region_->fd_offset + offset);
    return ::pread(region_->fd, into.data(), into.size(), at) == static_cast<ssize_t>(into.size());
  }
  const std::byte* const from = region_->bytes.data() + offset;
  const auto copy = [&] { std::memcpy(into.data(), from, into.size()); };
  return store::guard_mapping_access("a served region", copy).has_value();
}

void Sender::advance(std::uint64_t payload) {
  payload_left_ -= payload;
  while (payload != 0) {
    const std::uint64_t here = std::min(payload, range_.run_bytes - run_sent_);
    run_sent_ += here;
    payload -= here;
    if (run_sent_ == range_.run_bytes) {
      ++run_;
      run_sent_ = 0;
    }
  }
}

Sender::Sent Sender::broken(std::string why) {
  broken_reason_ = std::move(why);
  return {Outcome::kBroken, 0};
}

Sender::Sent Sender::failed(int error_number, const char* call) {
  if (error_number == EAGAIN || error_number == EWOULDBLOCK) return {Outcome::kBlocked, 0};
  if (error_number == EINTR) return {};
  if (error_number == EFAULT) return broken("the file behind the mapping was truncated");
  return broken(errno_error(error_number, call).message());
}

}  // namespace rekindle::transport::tcp
