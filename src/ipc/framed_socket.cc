#include "src/ipc/framed_socket.h"

#include <utility>

#include <sys/socket.h>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace rekindle::ipc {

namespace asio = boost::asio;

FramedSocket::FramedSocket(const asio::any_io_executor& executor, Channel channel,
                           FramedSocketOptions options)
    : descriptor_(executor),
      channel_(std::move(channel)),
      options_(std::move(options)),
      last_heard_(steady_now()),
      why_(options_.at_end) {}

FramedSocket::~FramedSocket() {
  if (descriptor_.is_open()) (void)descriptor_.release();
}

async::Task<Error> FramedSocket::run(OnFrame on_frame) {
  const auto self = shared_from_this();
  boost::system::error_code assigned;
  descriptor_.assign(channel_.fd(), assigned);
  if (assigned) close(errno_error(assigned.value(), "watch a unix socket"));
  while (!closed_) {
    boost::system::error_code error;
    co_await descriptor_.async_wait(asio::posix::stream_descriptor::wait_read,
                                    asio::redirect_error(asio::use_awaitable, error));
    if (closed_ || error) break;
    auto received = read_frames(on_frame);
    if (!received) {
      close(std::move(received).error());
    } else if (*received == Received::kEnd) {
      break;
    }
  }
  closed_ = true;
  (void)::shutdown(channel_.fd(), SHUT_RDWR);
  co_return why_;
}

Result<Received> FramedSocket::read_frames(const OnFrame& on_frame) {
  const TimePoint now = steady_now();
  TRY(const Received received, channel_.receive_frames(now, [&](Frame frame) -> Result<void> {
    // The owner may have closed the socket while it handled the frame before this one.
    return closed_ ? Result<void>() : on_frame(std::move(frame));
  }));
  if (received != Received::kNothing) last_heard_ = now;
  return received;
}

Result<void> FramedSocket::send(std::string body, std::vector<UniqueFd> descriptors) {
  if (closed_) return {};
  if (channel_.queued_bytes() > options_.max_queued_bytes) {
    close(options_.not_reading);
    return {};
  }
  TRY_VOID(channel_.push(std::move(body), std::move(descriptors)));
  flush();
  return {};
}

void FramedSocket::flush() {
  if (writing_ || closed_) return;
  if (auto sent = channel_.send_some(steady_now()); !sent) {
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

void FramedSocket::close(Error why) {
  if (closed_) return;
  closed_ = true;
  why_ = std::move(why);
  boost::system::error_code ignored;
  descriptor_.cancel(ignored);
  (void)::shutdown(channel_.fd(), SHUT_RDWR);
}

void FramedSocket::check(TimePoint now) {
  if (closed_) return;
  if (auto in_time = channel_.check_deadline(now); !in_time) close(std::move(in_time).error());
}

}  // namespace rekindle::ipc
