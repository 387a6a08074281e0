#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::coordinator {

// Lets answers out only while this coordinator may give them (see TermOptions::may_answer). Must
// outlive the server's close().
class AnswerGate {
 public:
  explicit AnswerGate(std::function<Result<void>()> may_answer)
      : may_answer_(std::move(may_answer)) {}

  Result<void> check() const { return may_answer_ ? may_answer_() : Result<void>(); }

  // Serves calls that wait. They are checked before they begin and before their answer goes out.
  using Handler = std::function<async::Task<Result<std::string>>(rpc::Peer, std::string)>;
  void serve(rpc::RpcServer& server, proto::Method method, Handler handler) const {
    server.handle(method,
                  [this, handler = std::move(handler)](const rpc::Peer& peer, std::string body,
                                                       const std::shared_ptr<rpc::EventSink>&) {
                    return checked(handler(peer, std::move(body)));
                  });
  }

 private:
  async::Task<Result<std::string>> checked(async::Task<Result<std::string>> answer) const {
    CO_TRY_VOID(check());
    auto body = co_await std::move(answer);
    CO_TRY_VOID(check());
    co_return body;
  }

  const std::function<Result<void>()> may_answer_;
};

}  // namespace rekindle::coordinator
