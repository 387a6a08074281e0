#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "proto/worker.pb.h"
#include "src/ipc/channel.h"
#include "src/ipc/life.h"
#include "src/ipc/unix_socket.h"
#include "tests/client/fake_model.h"
#include "tests/support/process.h"

// An agent that follows a test's script. Each connection runs one script on a thread of its own; an
// error there fails the test.
namespace rekindle::client::testing {

// Lets a script wait for its test, or the test for its script, at most 20 s.
class Gate {
 public:
  void open() { promise_.set_value(); }
  bool is_open() const {
    return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void wait() {
    if (future_.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      throw std::runtime_error("a gate was not opened");
    }
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_{promise_.get_future()};
};

// The agent's end of one connection. Its functions throw if another message comes than the script
// expects, or none within 20 s.
class AgentEnd {
 public:
  AgentEnd(ipc::Channel channel, ipc::Peer peer)
      : channel_(std::move(channel)), peer_(std::move(peer)) {}

  // The next frame, which must be of that kind. Pings before it are answered.
  proto::WorkerFrame expect(proto::WorkerFrame::KindCase kind);
  // Sets `descriptors` to the number that is sent along.
  void send(proto::AgentFrame frame, std::vector<UniqueFd> descriptors = {});
  // A Done whose `descriptors` is wrong.
  void send_uncounted(proto::AgentFrame frame, std::vector<UniqueFd> descriptors);
  void send_raw(std::string_view bytes);
  // Also answers it.
  void expect_ping();
  void answer_pings_until(const Gate& gate);
  void answer(const proto::WorkerFrame& call, proto::AgentFrame frame,
              std::vector<UniqueFd> descriptors = {});
  void fail(const proto::WorkerFrame& call, proto::StatusCode code, const std::string& message);
  void end_session(std::uint64_t session, proto::StatusCode code, const std::string& message);
  void commit(const proto::WorkerFrame& loaded);

  // Answers the hello with a life page. `silence_ms` 0: the default of the library.
  std::unique_ptr<ipc::LifePage> hello(std::uint32_t ping_ms = 100, std::uint32_t silence_ms = 0);
  // Answers the hello, then an attach to `model` with all tiles or none, as session 7.
  proto::WorkerFrame attach(const FakeModel& model, bool ready);
  // The next frame. Pings are answered meanwhile. nullopt: the worker has closed the connection.
  std::optional<proto::WorkerFrame> receive();
  // Answers pings until the worker closes the connection. Returns the other kinds that came.
  std::vector<proto::WorkerFrame> until_closed();
  void close() { channel_.reset(); }

  ipc::Peer& peer() { return peer_; }
  // Set before hello().
  bool gives_orders = true;

 private:
  std::optional<proto::WorkerFrame> receive_any();
  void pong(const proto::WorkerFrame& ping);

  std::optional<ipc::Channel> channel_;
  ipc::Peer peer_;
};

inline constexpr std::uint64_t kSession = 7;

class ScriptedAgent {
 public:
  using Script = std::function<void(AgentEnd&)>;

  // Listens, and runs the n-th script for the n-th connection.
  explicit ScriptedAgent(std::vector<Script> scripts);
  explicit ScriptedAgent(Script script) : ScriptedAgent(std::vector<Script>{std::move(script)}) {}
  ~ScriptedAgent() { finish(); }
  ScriptedAgent(const ScriptedAgent&) = delete;
  ScriptedAgent& operator=(const ScriptedAgent&) = delete;

  const std::string& store() const { return store_; }
  // Waits for the scripts to end. The destructor does so, too.
  void finish();
  void stop_listening() { listener_.reset(); }  // as a dead agent: its socket file stays

 private:
  void run(const std::vector<Script>& scripts);

  rekindle::testing::TempDir directory_;
  std::string store_;
  UniqueFd listener_;
  std::thread thread_;
};

}  // namespace rekindle::client::testing
