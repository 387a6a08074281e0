#pragma once

#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "proto/agent.pb.h"
#include "proto/rights.pb.h"
#include "recovery/agent/coordinator_link.h"
#include "recovery/rpc/method_rules.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"
#include "src/base/clock.h"

namespace rekindle::agent {

// Asks the coordinator whether a peer of this agent has a right, so that all hosts follow one
// rights file. Control thread only.
class FleetRights {
 public:
  // `link` outlives this.
  explicit FleetRights(CoordinatorLink& link) : link_(link) {}

  // Whether the peer has the right. kDenied names the missing rule. An agent without a configured
  // coordinator allows it: its own list of certificates or secrets decides who reaches it. Without
  // a connection the last answer for this peer counts, or that the last heartbeat told of no rights
  // file; kUnavailable: there was none. `model` "": all models.
  async::Task<Result<void>> may(rpc::Peer peer, rpc::Verb verb, std::string model);
  async::Task<Result<void>> may_read(rpc::Peer peer, std::string model) {
    return may(std::move(peer), rpc::Verb::kRead, std::move(model));
  }
  // Returns the status without the models that the peer may not read. As at the coordinator,
  // figures of the host stay.
  async::Task<proto::AgentStatusResponse> readable(rpc::Peer peer,
                                                   proto::AgentStatusResponse status);

 private:
  struct Answer {
    proto::AuthorizeResponse said;
    TimePoint at;
  };
  // The principals, the right, and the model.
  using Question = std::tuple<std::string, rpc::Verb, std::string>;

  CoordinatorLink& link_;
  std::map<Question, Answer> answers_;
};

}  // namespace rekindle::agent
