#include "transport/tcp/tcp_path.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "src/base/log.h"
#include "src/store/fault_guard.h"
#include "transport/session_hello.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tcp/tcp_wire.h"

namespace rekindle::transport::tcp {
namespace {

constexpr std::size_t kOutBytes = 64 << 10;
constexpr std::size_t kMaxReceiveIovecs = 128;
// The limits of one poll() and one recvmsg. They bound a turn, so that the poller's other paths get
// theirs.
constexpr std::uint64_t kReceiveTurnBytes = 4 << 20;
constexpr std::uint64_t kReceiveBytes = 1 << 20;

std::string_view encryption_of(const DataTls* tls) {
  if (tls == nullptr) return "";
  return tls->kernel_receives() ? " (encrypted, by the kernel)" : " (encrypted)";
}

}  // namespace

TcpPath::TcpPath(UniqueFd socket, std::unique_ptr<DataTls> tls)
    : socket_(std::move(socket)),
      tls_(std::move(tls)),
      opened_(tls_ ? DataTls::kRecordBytes : 0),
      description_(fmt::format("tcp {} -> {}{}", local_address(socket_.get()).to_string(),
                               peer_address(socket_.get()).to_string(), encryption_of(tls_.get()))),
      ring_(kMaxInFlight),
      out_(kOutBytes) {}

TcpPath::~TcpPath() {
  assert(count_ == 0 && "a Path with ops in flight was destroyed: abort() and poll() first");
  reset_and_close(socket_);
}

void TcpPath::push(const ReadOp& op) {
  encode(Request{.wr_id = op.wr_id,
                 .region = op.remote,
                 .range = {op.remote_offset, op.run_bytes, op.count, op.remote_stride}},
         std::span<std::byte, kRequestBytes>(out_.data() + out_end_, kRequestBytes));
  out_end_ += kRequestBytes;
  ring_[(head_ + count_) % kMaxInFlight] = {
      op.wr_id, op.local, op.run_bytes, op.local_stride,
      // The server refuses an overflowing product, too, so nothing lands for it.
      payload_bytes(op.run_bytes, op.count).value_or(0)};
  ++count_;
}

Completion TcpPath::pop(OpStatus status) {
  const Completion completion{front().wr_id, status};
  ++head_;
  --count_;
  return completion;
}

Result<std::size_t> TcpPath::post(std::span<const ReadOp> ops) {
  if (broken_) {
    return fail(ErrorCode::kPeerLost, "{}: {}", description_, broken_reason_);
  }
  if (out_begin_ != 0 && out_.size() - out_end_ < ops.size() * kRequestBytes) {
    std::memmove(out_.data(), out_.data() + out_begin_, out_end_ - out_begin_);
    out_end_ -= out_begin_;
    out_begin_ = 0;
  }
  std::size_t taken = 0;
  while (taken < ops.size() && count_ < kMaxInFlight && out_.size() - out_end_ >= kRequestBytes) {
    push(ops[taken++]);
  }
  flush();
  return taken;
}

void TcpPath::flush() {
  while (!broken_ && out_begin_ != out_end_) {
    const ssize_t n = send_some(std::span(out_).subspan(out_begin_, out_end_ - out_begin_));
    if (n >= 0) {
      out_begin_ += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      // Some answers may have arrived before. receive() reads them and then reports the end.
      break;
    }
  }
  out_begin_ = out_end_ = 0;
}

ssize_t TcpPath::send_some(std::span<const std::byte> bytes) {
  if (tls_) return tls_->send(bytes);
  return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t TcpPath::receive_some(std::span<const iovec> parts) {
  if (!tls_) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = parts.size();
    return ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
  }
  if (opened_begin_ == opened_end_) {
    const ssize_t n = tls_->receive(opened_);
    if (n <= 0) return n;
    opened_begin_ = 0;
    opened_end_ = static_cast<std::size_t>(n);
  }
  std::size_t copied = 0;
  const auto copy = [&] {
    for (const iovec& part : parts) {
      const std::size_t size = std::min(part.iov_len, opened_end_ - opened_begin_ - copied);
      std::memcpy(part.iov_base, opened_.data() + opened_begin_ + copied, size);
      copied += size;
    }
  };
  if (!store::guard_mapping_access("the destination", copy)) {
    errno = EFAULT;
    return -1;
  }
  opened_begin_ += copied;
  return static_cast<ssize_t>(copied);
}

std::size_t TcpPath::poll(std::span<Completion> out) {
  std::size_t filled = 0;
  flush();
  const std::uint64_t turn_end = bytes_landed_ + kReceiveTurnBytes;
  while (!broken_ && filled < out.size()) {
    if (in_payload_ && payload_left_ == 0) {
      in_payload_ = false;
      out[filled++] = pop(OpStatus::kOk);
    } else if (!in_payload_ && header_used_ == header_.size()) {
      if (const auto completion = take_header()) out[filled++] = *completion;
    } else if (bytes_landed_ >= turn_end || !receive()) {
      break;
    }
  }
  while (broken_ && count_ != 0 && filled < out.size()) {
    const bool landed = std::exchange(in_payload_, false) && payload_left_ == 0;
    out[filled++] = pop(landed ? OpStatus::kOk : *broken_);
  }
  return filled;
}

bool TcpPath::receive() {
  std::array<iovec, kMaxReceiveIovecs> parts;
  std::size_t used = 0;
  std::uint64_t planned = 0;
  if (in_payload_) {
    const InFlight& op = front();
    const std::uint64_t limit = std::min(payload_left_, kReceiveBytes);
    std::uint64_t run = run_;
    std::uint64_t skip = run_landed_;
    while (planned < limit && used < parts.size() - 1) {
      const std::uint64_t size = std::min(op.run_bytes - skip, limit - planned);
      parts[used++] = {op.local + run * op.local_stride + skip, size};
      planned += size;
      ++run;
      skip = 0;
    }
  }
  const bool with_header = !in_payload_ || planned == payload_left_;
  if (with_header) parts[used++] = {header_.data() + header_used_, header_.size() - header_used_};

  const ssize_t n = receive_some(std::span(parts).first(used));
  if (n > 0) {
    const auto moved = static_cast<std::uint64_t>(n);
    const std::uint64_t of_payload = std::min(moved, planned);
    land(of_payload);
    header_used_ += moved - of_payload;
    return true;
  }
  if (n == 0) {
    break_path(OpStatus::kPeerLost, "the peer closed the stream");
  } else if (errno == EINTR) {
    return true;
  } else if (errno == EFAULT) {
    // The caller's file was truncated, so the destination cannot be written any more.
    break_path(OpStatus::kLocalFault, "the destination cannot be written");
  } else if (errno != EAGAIN && errno != EWOULDBLOCK) {
    break_path(OpStatus::kPeerLost, errno_error(errno, "receive").message());
  }
  return false;
}

void TcpPath::land(std::uint64_t bytes) {
  bytes_landed_ += bytes;
  payload_left_ -= bytes;
  const std::uint64_t run_bytes = front().run_bytes;
  while (bytes != 0) {
    const std::uint64_t here = std::min(bytes, run_bytes - run_landed_);
    run_landed_ += here;
    bytes -= here;
    if (run_landed_ == run_bytes) {
      ++run_;
      run_landed_ = 0;
    }
  }
}

std::optional<Completion> TcpPath::take_header() {
  header_used_ = 0;
  const auto response = decode_response(header_);
  if (!response) {
    break_path(OpStatus::kPeerLost, response.error().message());
    return std::nullopt;
  }
  if (count_ == 0 || response->wr_id != front().wr_id) {
    break_path(OpStatus::kPeerLost, "the peer answered a request that was not next");
    return std::nullopt;
  }
  const bool ok = response->status == OpStatus::kOk;
  if (response->bytes != (ok ? front().total : 0)) {
    break_path(OpStatus::kPeerLost, "the peer answered with another number of bytes");
    return std::nullopt;
  }
  if (!ok || response->bytes == 0) return pop(response->status);
  in_payload_ = true;
  run_ = 0;
  run_landed_ = 0;
  payload_left_ = response->bytes;
  return std::nullopt;
}

void TcpPath::break_path(OpStatus status, std::string_view why) {
  broken_ = status;
  broken_reason_ = why;
  out_begin_ = out_end_ = 0;
  // Resets the connection and frees the kernel's buffers. The descriptor stays readable (EPOLLHUP),
  // so a thread that waits for it keeps polling.
  sockaddr unspecified{};
  unspecified.sa_family = AF_UNSPEC;
  if (::connect(socket_.get(), &unspecified, sizeof unspecified) != 0) {
    (void)::shutdown(socket_.get(), SHUT_RDWR);
  }
  log::debug("tcp.path.end", "path", description_, "why", broken_reason_, "in_flight", count_);
}

void TcpPath::abort() {
  if (broken_) return;
  break_path(OpStatus::kAborted, "aborted");
}

namespace {

constexpr HelloProtocol kProtocol{"data", kWireVersion,
                                  "the session has as many streams as the peer allows"};

Result<UniqueFd> connect_socket(const SocketAddress& address, const std::string& congestion,
                                TimePoint deadline) {
  UniqueFd socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno(errno, "socket");
  tune_stream(socket.get());
  TRY_VOID(set_congestion_control(socket.get(), congestion));
  if (::connect(socket.get(), address.get(), address.length) != 0) {
    if (errno != EINPROGRESS) return fail_errno(errno, "connect");
    TRY_VOID(wait_ready(socket.get(), POLLOUT, deadline, "the peer did not accept"));
    int error = 0;
    socklen_t length = sizeof error;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    if (error != 0) return fail_errno(error, "connect");
  }
  return socket;
}

// The hello of one stream, at the connecting end. Waits until the deadline at most.
class Hello {
 public:
  Hello(int fd, DataTls* tls, const PathTarget& target, TimePoint deadline)
      : fd_(fd), tls_(tls), target_(target), deadline_(deadline) {
    exchange_.incarnation = target.incarnation;
    exchange_.reader_nonce = HelloExchange::fresh_nonce();
  }

  Result<void> exchange() {
    TRY_VOID(send_hello());
    TRY_VOID(await_answer());
    if (target_.sends_token) return {};
    TRY_VOID(answer_challenge());
    return await_answer();
  }
  bool refused_plain() const { return refused_plain_; }

 private:
  Result<void> send_hello() const {
    const bool token = target_.sends_token;
    std::array<std::byte, kClientHelloBytes + kNonceBytes> frame;
    encode(ClientHello{token ? kTokenWireVersion : kWireVersion,
                       token ? target_.token.bytes : handle_of(target_.token).bytes,
                       target_.incarnation},
           std::span(frame).first<kClientHelloBytes>());
    std::memcpy(frame.data() + kClientHelloBytes, exchange_.reader_nonce.data(), kNonceBytes);
    return send(std::span(frame).first(token ? kClientHelloBytes : frame.size()));
  }

  Result<void> await_answer() {
    std::array<std::byte, kServerHelloBytes> frame;
    TRY_VOID(receive(frame));
    TRY(const ServerHello hello, decode_server_hello(frame));
    refused_plain_ = hello.status == HelloStatus::kNotEncrypted;
    return check_hello({hello.status, hello.version, hello.incarnation}, kProtocol, target_);
  }

  Result<void> answer_challenge() {
    std::array<std::byte, kChallengeBytes> frame;
    TRY_VOID(receive(frame));
    const Challenge challenge = decode_challenge(frame);
    exchange_.source_nonce = challenge.nonce;
    if (!exchange_.proves(target_.token, HelloExchange::Side::kSource, challenge.proof)) {
      return fail(ErrorCode::kDenied,
                  "another process than the source answers at {}: it does not know the session",
                  target_.endpoint);
    }
    const auto proof = exchange_.prove(target_.token, HelloExchange::Side::kReader);
    return send(std::as_bytes(std::span(proof)));
  }

  Result<void> send(std::span<const std::byte> bytes) const {
    const ssize_t sent = tls_ != nullptr
                             ? tls_->send(bytes)
                             : ::send(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent != static_cast<ssize_t>(bytes.size())) {
      return fail_errno(errno, "send the hello");
    }
    return {};
  }

  Result<void> receive(std::span<std::byte> into) const {
    while (!into.empty()) {
      const ssize_t n = tls_ != nullptr ? tls_->receive(into)
                                        : ::recv(fd_, into.data(), into.size(), MSG_DONTWAIT);
      if (n > 0) {
        into = into.subspan(static_cast<std::size_t>(n));
      } else if (n == 0) {
        return fail(ErrorCode::kPeerLost, "the peer closed the stream before its hello");
      } else if (errno == EAGAIN) {
        TRY_VOID(wait_ready(fd_, POLLIN, deadline_, "the peer did not answer the hello"));
      } else if (errno != EINTR) {
        return fail_errno(errno, "receive the hello");
      }
    }
    return {};
  }

  const int fd_;
  DataTls* const tls_;
  const PathTarget& target_;
  const TimePoint deadline_;
  HelloExchange exchange_;
  bool refused_plain_ = false;
};

Result<std::unique_ptr<DataTls>> shake_hands(int fd, const PathTarget& target, TimePoint deadline) {
  if (target.sends_token) {
    return fail(ErrorCode::kUnavailable,
                "the source is of a release that does not encrypt: upgrade it, or pull without "
                "--encrypt");
  }
  TRY(auto tls, DataTls::connect(fd, target.token));
  while (true) {
    switch (tls->handshake()) {
      case DataTls::Io::kDone:
        return tls;
      case DataTls::Io::kWantsRead:
        TRY_VOID(wait_ready(fd, POLLIN, deadline, "the peer did not answer the TLS handshake"));
        break;
      case DataTls::Io::kWantsWrite:
        TRY_VOID(wait_ready(fd, POLLOUT, deadline, "the peer did not take the TLS handshake"));
        break;
      case DataTls::Io::kBroken:
        return fail(ErrorCode::kDenied,
                    "no TLS with the source ({}): its session has ended, or another process "
                    "answers there",
                    tls->broken_reason());
    }
  }
}

class TcpConnector final : public Connector {
 public:
  TcpConnector(std::string congestion, Encryption encryption)
      : congestion_(std::move(congestion)), encryption_(encryption) {}
  std::string_view transport() const override { return "tcp"; }

  Result<std::unique_ptr<Path>> connect(const PathTarget& target, TimePoint deadline) override {
    TRY(const HostPort endpoint, parse_endpoint(target.endpoint));
    TRY(const auto addresses, resolve(endpoint, deadline));
    std::optional<Error> last;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      // Each address gets its part of the time, so that a silent one does not use it all up.
      const TimePoint now = std::chrono::steady_clock::now();
      const auto parts = static_cast<std::int64_t>(addresses.size() - i);
      auto path = connect_one(addresses[i], target, now + (deadline - now) / parts);
      if (path) return path;
      last =
          std::move(path).error().with_context(fmt::format("connect {}", addresses[i].to_string()));
      // The peer itself has answered: its other addresses would answer the same.
      if (last->code() == ErrorCode::kDenied || last->code() == ErrorCode::kStale) break;
    }
    return fail(std::move(*last));
  }

 private:
  Result<std::unique_ptr<Path>> connect_one(const SocketAddress& address, const PathTarget& target,
                                            TimePoint deadline) const {
    if (encryption_ == Encryption::kAlways) return connect_with(true, address, target, deadline);
    bool demanded = false;
    auto path = connect_with(false, address, target, deadline, &demanded);
    return demanded ? connect_with(true, address, target, deadline) : std::move(path);
  }

  // `demanded` is set when the source refuses a plain stream.
  Result<std::unique_ptr<Path>> connect_with(bool encrypted, const SocketAddress& address,
                                             const PathTarget& target, TimePoint deadline,
                                             bool* demanded = nullptr) const {
    TRY(UniqueFd socket, connect_socket(address, congestion_, deadline));
    std::unique_ptr<DataTls> tls;
    if (encrypted) {
      TRY(tls, shake_hands(socket.get(), target, deadline));
    }
    Hello hello(socket.get(), tls.get(), target, deadline);
    auto accepted = hello.exchange();
    if (demanded != nullptr) *demanded = hello.refused_plain();
    if (!accepted) return fail(std::move(accepted).error());
    return std::make_unique<TcpPath>(std::move(socket), std::move(tls));
  }

  const std::string congestion_;
  const Encryption encryption_;
};

}  // namespace

std::unique_ptr<Connector> make_connector(std::string congestion, Encryption encryption) {
  return std::make_unique<TcpConnector>(std::move(congestion), encryption);
}

}  // namespace rekindle::transport::tcp
