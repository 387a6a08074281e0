#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <signal.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>

#include "recovery/rpc/methods.h"
#include "recovery/rpc/rpc.h"
#include "tools/cli/cli_session.h"

namespace rekindle::cli {

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
  const std::string& address() const { return address_; }

 private:
  Remote() = default;
  Result<std::string> call_raw(proto::Method method, std::string body);
  async::Task<Result<std::shared_ptr<rpc::RpcClient>>> connect();
  async::Task<Result<std::string>> exchange(proto::Method method, std::string body);

  boost::asio::io_context io_;
  rpc::Identity identity_;
  std::string address_;
  std::shared_ptr<rpc::RpcClient> client_;
};

// Blocks SIGINT and SIGTERM for the rest of the process, for a command that repeats its calls until
// one of them comes.
class Interrupts {
 public:
  Interrupts();
  // Sleeps. Returns true as soon as a signal comes.
  bool within(std::chrono::milliseconds pause) const;

 private:
  sigset_t signals_{};
};

}  // namespace rekindle::cli
