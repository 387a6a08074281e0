#include "tests/client/scripted_agent.h"

#include <filesystem>
#include <stdexcept>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/ipc/unix_socket.h"
#include "tests/support/must.h"

namespace rekindle::client::testing {

namespace {

TimePoint soon() { return SteadyClock().now() + std::chrono::seconds(20); }

}  // namespace

std::optional<proto::WorkerFrame> AgentEnd::receive_any() {
  auto frame = channel_->receive(soon());
  if (!frame && frame.error().code() == ErrorCode::kPeerLost) return std::nullopt;
  if (!frame) throw std::runtime_error(frame.error().message());
  proto::WorkerFrame message;
  if (!message.ParseFromString(frame->body)) throw std::runtime_error("malformed frame");
  return message;
}

std::optional<proto::WorkerFrame> AgentEnd::receive() {
  while (true) {
    auto frame = receive_any();
    if (!frame || !frame->has_ping()) return frame;
    pong(*frame);
  }
}

void AgentEnd::pong(const proto::WorkerFrame& ping) {
  proto::AgentFrame frame;
  frame.mutable_pong();
  frame.set_call(ping.call());
  frame.set_descriptors(0);
  // The next receive() notices a worker that is gone meanwhile.
  (void)channel_->send(frame.SerializeAsString(), {}, soon());
}

void AgentEnd::expect_ping() {
  const auto frame = receive_any();
  if (!frame || !frame->has_ping()) throw std::runtime_error("a ping was expected");
  pong(*frame);
}

proto::WorkerFrame AgentEnd::expect(proto::WorkerFrame::KindCase kind) {
  auto frame = receive();
  if (!frame) throw std::runtime_error("the worker has closed the connection");
  if (frame->kind_case() != kind) {
    throw std::runtime_error("another frame was expected than " + frame->ShortDebugString());
  }
  return std::move(*frame);
}

void AgentEnd::send(proto::AgentFrame frame, std::vector<UniqueFd> descriptors) {
  frame.set_descriptors(static_cast<std::uint32_t>(descriptors.size()));
  must(channel_->send(frame.SerializeAsString(), std::move(descriptors), soon()));
}

void AgentEnd::answer_pings_until(const Gate& gate) {
  const TimePoint end = soon();
  while (!gate.is_open()) {
    if (SteadyClock().now() > end) throw std::runtime_error("a gate was not opened");
    const auto turn = SteadyClock().now() + std::chrono::milliseconds(10);
    if (must(ipc::wait_for(channel_->fd(), POLLIN, turn))) expect_ping();
  }
}

void AgentEnd::send_uncounted(proto::AgentFrame frame, std::vector<UniqueFd> descriptors) {
  frame.mutable_done();
  must(channel_->send(frame.SerializeAsString(), std::move(descriptors), soon()));
}

void AgentEnd::send_raw(std::string_view bytes) {
  if (::send(channel_->fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(bytes.size())) {
    throw std::runtime_error("send");
  }
}

void AgentEnd::answer(const proto::WorkerFrame& call, proto::AgentFrame frame,
                      std::vector<UniqueFd> descriptors) {
  frame.set_call(call.call());
  if (frame.session() == 0) frame.set_session(call.session());
  send(std::move(frame), std::move(descriptors));
}

void AgentEnd::fail(const proto::WorkerFrame& call, proto::StatusCode code,
                    const std::string& message) {
  proto::AgentFrame frame;
  frame.mutable_error()->set_code(code);
  frame.mutable_error()->set_message(message);
  answer(call, std::move(frame));
}

void AgentEnd::end_session(std::uint64_t session, proto::StatusCode code,
                           const std::string& message) {
  proto::AgentFrame frame;
  frame.set_session(session);
  frame.mutable_error()->set_code(code);
  frame.mutable_error()->set_message(message);
  send(std::move(frame));
}

void AgentEnd::commit(const proto::WorkerFrame& loaded) {
  proto::AgentFrame frame;
  frame.mutable_committed()->mutable_id()->set_model("qwen3");
  frame.mutable_committed()->mutable_id()->set_version(41);
  answer(loaded, std::move(frame));
}

std::unique_ptr<ipc::LifePage> AgentEnd::hello(std::uint32_t ping_ms, std::uint32_t silence_ms) {
  const auto call = expect(proto::WorkerFrame::kHello);
  auto page = must(ipc::LifePage::create());
  std::vector<UniqueFd> descriptors;
  descriptors.emplace_back(::fcntl(page->fd(), F_DUPFD_CLOEXEC, 0));
  proto::AgentFrame frame;
  frame.mutable_hello()->set_protocol(1);
  frame.mutable_hello()->set_client(1);
  frame.mutable_hello()->set_gives_orders(gives_orders);
  frame.mutable_hello()->set_ping_interval_ms(ping_ms);
  frame.mutable_hello()->set_silence_ms(silence_ms);
  answer(call, std::move(frame), std::move(descriptors));
  return page;
}

proto::WorkerFrame AgentEnd::attach(const FakeModel& model, bool ready) {
  hello();
  auto call = expect(proto::WorkerFrame::kAttach);
  send(model.attached(call.call(), kSession, ready), model.segments());
  return call;
}

std::vector<proto::WorkerFrame> AgentEnd::until_closed() {
  std::vector<proto::WorkerFrame> frames;
  while (auto frame = receive()) frames.push_back(std::move(*frame));
  return frames;
}

ScriptedAgent::ScriptedAgent(std::vector<Script> scripts) : store_(directory_.path().string()) {
  const std::string agent = store_ + "/agent";
  std::filesystem::create_directory(agent);
  if (::chmod(agent.c_str(), 0700) != 0) throw std::runtime_error("chmod");
  listener_ = must(ipc::listen_unix_socket(agent + "/worker.sock"));
  thread_ = std::thread([this, scripts = std::move(scripts)] { run(scripts); });
}

void ScriptedAgent::run(const std::vector<Script>& scripts) {
  std::vector<std::thread> threads;
  for (const Script& script : scripts) {
    const auto ready = ipc::wait_for(listener_.get(), POLLIN, soon());
    if (!ready || !*ready) {
      ADD_FAILURE() << "nobody has connected";
      break;
    }
    auto socket =
        std::make_shared<UniqueFd>(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    threads.emplace_back([socket, &script] {
      try {
        ipc::Peer peer = must(ipc::peer_of(socket->get()));
        AgentEnd end(must(ipc::Channel::adopt(std::move(*socket), 0)), std::move(peer));
        script(end);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "the agent's script: " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void ScriptedAgent::finish() {
  if (thread_.joinable()) thread_.join();
}

}  // namespace rekindle::client::testing
