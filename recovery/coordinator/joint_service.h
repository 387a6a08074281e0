#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <boost/asio/any_io_executor.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/coordinator/coordinator_service.h"
#include "recovery/coordinator/core/core.h"
#include "src/async/task.h"

namespace rekindle::coordinator {

// Leaves the spans by which the publication of a complete roster and its agents are found.
void record_roster(trace::Tracer& tracer, const ModelVersion& id, const JointRoster& roster);

// The call of joint publications, served from a Core. It waits for the complete roster, at most as
// long as its caller wants and 5 s. On the executor's one thread; must outlive the server's
// close().
class JointService {
 public:
  JointService(boost::asio::any_io_executor executor, Core& core,
               std::function<Result<void>()> may_answer, trace::Tracer* tracer = nullptr);
  void attach(rpc::RpcServer& server);
  // Time has passed in the core: calls that wait for a roster look again.
  void wake_waiters();

 private:
  async::Task<Result<std::string>> report(rpc::Peer peer, std::string body);

  Core& core_;
  const AnswerGate gate_;
  async::Notifier changed_;
  trace::Tracer* const tracer_;
  std::uint64_t seen_revision_ = 0;
};

}  // namespace rekindle::coordinator
