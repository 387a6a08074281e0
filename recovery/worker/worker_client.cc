#include "recovery/worker/worker_client.h"

#include <utility>

namespace rekindle::worker {

namespace {

ipc::FramedSocketOptions client_socket_options() {
  return {.max_queued_bytes = 8u << 20,  // beside one answer
          .at_end = Error(ErrorCode::kPeerLost, "closed its connection (it exited, or was killed)"),
          .not_reading = Error(ErrorCode::kPeerLost, "does not read what it is sent")};
}

}  // namespace

Client::Client(const boost::asio::any_io_executor& executor, ClientId id, ipc::Channel channel,
               ipc::Peer peer)
    : id_(id),
      peer_(std::move(peer)),
      pid_(static_cast<std::uint32_t>(peer_.pid)),
      socket_(std::make_shared<ipc::FramedSocket>(executor, std::move(channel),
                                                  client_socket_options())) {}

async::Task<Error> Client::run(OnFrame on_frame) {
  const auto self = shared_from_this();
  ipc::FramedSocket::OnFrame parse = [&on_frame](ipc::Frame frame) -> Result<void> {
    proto::WorkerFrame parsed;
    if (!parsed.ParseFromString(frame.body)) {
      return fail(ErrorCode::kInvalid, "sent a malformed frame of {} bytes", frame.body.size());
    }
    on_frame(std::move(parsed), std::move(frame.descriptors));
    return {};
  };
  co_return co_await socket_->run(std::move(parse));
}

void Client::send(const proto::AgentFrame& frame, std::vector<UniqueFd> descriptors) {
  send_encoded(frame.SerializeAsString(), std::move(descriptors));
}

void Client::send_encoded(std::string frame, std::vector<UniqueFd> descriptors) {
  auto sent = socket_->send(std::move(frame), std::move(descriptors));
  if (!sent) close(std::move(sent).error());
}

void Client::check(TimePoint now, std::chrono::milliseconds silence) {
  socket_->check(now);
  if (closed() || now - socket_->last_heard() < silence) return;
  close(Error(ErrorCode::kTimeout,
              fmt::format("has been silent for {} ms: it is stopped, or hangs", silence.count())));
}

}  // namespace rekindle::worker
