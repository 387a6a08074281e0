#pragma once

#include <functional>
#include <string>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/rpc/methods.h"
#include "recovery/rpc/rpc.h"
#include "src/base/result.h"

namespace rekindle::rpc {

struct DrillOptions {
  // Otherwise every drill is denied.
  bool allowed = false;
  // Whether the caller has the right `admin`, where no guard of the server knows the rights.
  // Buffers for a benchmark that an administrator asked of another member need no right. Empty:
  // the guard has asked.
  std::function<async::Task<Result<void>>(Peer)> admit = {};
  // Kills a worker and returns its pid; with `dry_run` it only finds it. Empty: this daemon has no
  // workers.
  std::function<Result<std::uint32_t>(const std::string& instance, std::uint32_t rank,
                                      bool dry_run)>
      kill_worker = {};
  // Answers the requests that concern reads of data: those of `rekindle bench fleet` and `rekindle
  // drill cut-link`. Empty: this daemon has no data to read.
  std::function<async::Task<Result<proto::DrillResponse>>(Peer, proto::DrillRequest)> data = {};
};

// Before listen(). Answers DRILL: lets this daemon or one of its workers fail on purpose, or loads
// its links.
void serve_drills(RpcServer& server, boost::asio::any_io_executor executor, DrillOptions options);

}  // namespace rekindle::rpc
