#include "recovery/device/connection.h"

#include <utility>

#include <sys/socket.h>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace rekindle::device {

namespace asio = boost::asio;

namespace {
constexpr int kReadsPerWake = 16;
constexpr std::size_t kMostQueuedBytes = 64u << 20;
}  // namespace

Connection::~Connection() {
  if (descriptor_.is_open()) (void)descriptor_.release();
}

async::Task<Error> Connection::run(OnFrame on_frame) {
  const auto self = shared_from_this();
  boost::system::error_code assigned;
  descriptor_.assign(channel_.fd(), assigned);
  if (assigned) close(errno_error(assigned.value(), "watch the device process' socket"));
  while (!closed_) {
    boost::system::error_code error;
    co_await descriptor_.async_wait(asio::posix::stream_descriptor::wait_read,
                                    asio::redirect_error(asio::use_awaitable, error));
    if (closed_ || error) break;
    auto more = read_some(on_frame);
    if (!more) {
      close(std::move(more).error());
    } else if (!*more) {
      break;
    }
  }
  closed_ = true;
  (void)::shutdown(channel_.fd(), SHUT_RDWR);
  co_return why_;
}

// False: the other end of the stream has gone.
Result<bool> Connection::read_some(const OnFrame& on_frame) {
  for (int i = 0; i < kReadsPerWake && !closed_; ++i) {
    TRY(const auto received, channel_.receive_some(SteadyClock().now()));
    if (received == ipc::Received::kEnd) return false;
    if (received == ipc::Received::kNothing) return true;
    while (!closed_) {
      TRY(auto frame, channel_.next());
      if (!frame) break;
      TRY_VOID(on_frame(frame->body));
    }
  }
  return true;
}

Result<void> Connection::send(std::string body, std::vector<UniqueFd> descriptors) {
  if (closed_) return {};
  if (channel_.queued_bytes() > kMostQueuedBytes) {
    close(Error(ErrorCode::kTimeout, "does not read what it is sent"));
    return {};
  }
  TRY_VOID(channel_.push(std::move(body), std::move(descriptors)));
  flush();
  return {};
}

void Connection::flush() {
  if (writing_ || closed_) return;
  if (auto sent = channel_.send_some(SteadyClock().now()); !sent) {
    return close(std::move(sent).error());
  }
  if (!channel_.wants_to_send() || !descriptor_.is_open()) return;
  writing_ = true;
  descriptor_.async_wait(asio::posix::stream_descriptor::wait_write,
                         [self = shared_from_this()](const boost::system::error_code& error) {
                           self->writing_ = false;
                           if (!error) self->flush();
                         });
}

void Connection::close(Error why) {
  if (closed_) return;
  closed_ = true;
  why_ = std::move(why);
  boost::system::error_code ignored;
  descriptor_.cancel(ignored);
  (void)::shutdown(channel_.fd(), SHUT_RDWR);
}

void Connection::check(TimePoint now) {
  if (closed_) return;
  if (auto in_time = channel_.check_deadline(now); !in_time) close(std::move(in_time).error());
}

}  // namespace rekindle::device
