#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <signal.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>

#include "recovery/rpc/methods.h"
#include "recovery/rpc/rpc.h"
#include "tools/cli/cli_session.h"

namespace rekindle::cli {

// The identity of a command in its calls, with the cluster secret of the settings.
Result<rpc::Identity> command_identity(const Settings& settings);

// Makes blocking calls to a coordinator or agent over one connection, and connects again when it
// broke.
class Remote {
 public:
  static Result<std::unique_ptr<Remote>> create(const Settings& settings, std::string address);

  template <proto::Method method>
  Result<rpc::ResponseOf<method>> call(const rpc::RequestOf<method>& request) {
    TRY(const std::string body, call_raw(method, request.SerializeAsString()));
    return rpc::parse_body<rpc::ResponseOf<method>>(body);
  }
  // Asked several times a second while a call waits for its answer. False ends the call.
  void while_waiting(std::function<bool()> goes_on) { goes_on_ = std::move(goes_on); }
  const std::string& address() const { return address_; }
  // The incarnation of the daemon that the last call has reached.
  Incarnation answered_by() const {
    return client_ == nullptr ? Incarnation() : client_->peer().incarnation;
  }

 private:
  Remote() = default;
  Result<std::string> call_raw(proto::Method method, std::string body);
  async::Task<Result<std::shared_ptr<rpc::RpcClient>>> connect();
  async::Task<Result<std::string>> exchange(proto::Method method, std::string body);

  boost::asio::io_context io_;
  rpc::Identity identity_;
  std::string address_;
  std::shared_ptr<rpc::RpcClient> client_;
  std::function<bool()> goes_on_ = [] { return true; };
};

// Blocks SIGINT and SIGTERM for the rest of the process, for a command that repeats its calls until
// one of them comes.
class Interrupts {
 public:
  Interrupts();
  // Sleeps. Returns true as soon as a signal comes, and at once after one has come.
  bool within(std::chrono::milliseconds pause);
  // After a signal.
  int exit_code() const { return kExitSignal + signal_; }

 private:
  sigset_t signals_{};
  int signal_ = 0;
};

}  // namespace rekindle::cli
