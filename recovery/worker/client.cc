#include "recovery/worker/client.h"

#include <utility>

#include <sys/socket.h>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "src/base/clock.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr int kReadsPerWake = 16;
constexpr std::size_t kMostQueuedBytes = 8u << 20;  // beside one answer

}  // namespace

Client::Client(const asio::any_io_executor& executor, ClientId id, ipc::Channel channel,
               ipc::Peer peer)
    : descriptor_(executor),
      id_(id),
      channel_(std::move(channel)),
      peer_(std::move(peer)),
      pid_(static_cast<std::uint32_t>(peer_.pid)),
      last_heard_(steady_now()) {}

Client::~Client() {
  if (descriptor_.is_open()) (void)descriptor_.release();
}

async::Task<Error> Client::run(OnFrame on_frame) {
  const auto self = shared_from_this();
  boost::system::error_code assigned;
  descriptor_.assign(channel_.fd(), assigned);
  if (assigned) close(errno_error(assigned.value(), "watch a worker's socket"));
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
  co_return why_;
}

// False: the worker's end of the stream.
Result<bool> Client::read_some(const OnFrame& on_frame) {
  for (int i = 0; i < kReadsPerWake; ++i) {
    TRY(const auto received, channel_.receive_some(steady_now()));
    if (received == ipc::Received::kEnd) return false;
    if (received == ipc::Received::kNothing) return true;
    last_heard_ = steady_now();
    while (!closed_) {
      TRY(auto frame, channel_.next());
      if (!frame) break;
      proto::WorkerFrame parsed;
      if (!parsed.ParseFromString(frame->body)) {
        return fail(ErrorCode::kInvalid, "sent a malformed frame of {} bytes", frame->body.size());
      }
      on_frame(std::move(parsed), std::move(frame->descriptors));
    }
    if (closed_) return true;
  }
  return true;
}

void Client::send(const proto::AgentFrame& frame, std::vector<UniqueFd> descriptors) {
  send_encoded(frame.SerializeAsString(), std::move(descriptors));
}

void Client::send_encoded(std::string frame, std::vector<UniqueFd> descriptors) {
  if (closed_) return;
  if (channel_.queued_bytes() > kMostQueuedBytes) {
    return close(Error(ErrorCode::kPeerLost, "does not read what it is sent"));
  }
  if (auto pushed = channel_.push(std::move(frame), std::move(descriptors)); !pushed) {
    return close(std::move(pushed).error());
  }
  flush();
}

void Client::flush() {
  if (writing_ || closed_) return;
  if (auto sent = channel_.send_some(steady_now()); !sent) return close(std::move(sent).error());
  if (!channel_.wants_to_send()) return;
  writing_ = true;
  descriptor_.async_wait(asio::posix::stream_descriptor::wait_write,
                         [self = shared_from_this()](const boost::system::error_code& error) {
                           self->writing_ = false;
                           if (!error) self->flush();
                         });
}

void Client::close(Error why) {
  if (closed_) return;
  closed_ = true;
  why_ = std::move(why);
  boost::system::error_code ignored;
  descriptor_.cancel(ignored);
  (void)::shutdown(channel_.fd(), SHUT_RDWR);
}

void Client::check(TimePoint now, std::chrono::milliseconds silence) {
  if (closed_) return;
  if (auto in_time = channel_.check_deadline(now); !in_time) {
    return close(std::move(in_time).error());
  }
  if (now - last_heard_ < silence) return;
  close(Error(ErrorCode::kTimeout,
              fmt::format("has been silent for {} ms: it is stopped, or hangs", silence.count())));
}

}  // namespace rekindle::worker
