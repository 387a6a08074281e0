#include "recovery/rpc/drills.h"

#include <csignal>
#include <memory>
#include <utility>

#include <unistd.h>

#include <boost/asio/steady_timer.hpp>

#include "proto/drill.pb.h"
#include "recovery/rpc/methods.h"
#include "src/base/log.h"

namespace rekindle::rpc {
namespace {

// For the answer to leave this process.
constexpr std::chrono::milliseconds kAnswerTime{200};

void kill_self(const boost::asio::any_io_executor& executor) {
  const auto timer = std::make_shared<boost::asio::steady_timer>(executor, kAnswerTime);
  timer->async_wait([timer](const boost::system::error_code&) { ::kill(::getpid(), SIGKILL); });
}

Result<proto::DrillResponse> answer(const boost::asio::any_io_executor& executor,
                                    const DrillOptions& options, const Peer& peer,
                                    const proto::DrillRequest& request) {
  if (!options.allowed) {
    return fail(ErrorCode::kDenied,
                "this daemon allows no drills; start it with --allow-drills where they are meant");
  }
  proto::DrillResponse response;
  switch (request.kind_case()) {
    case proto::DrillRequest::kKillSelf:
      response.set_pid(static_cast<std::uint32_t>(::getpid()));
      break;
    case proto::DrillRequest::kKillWorker: {
      if (!options.kill_worker) return fail(ErrorCode::kInvalid, "a coordinator has no workers");
      const auto& worker = request.kill_worker();
      TRY(const auto pid, options.kill_worker(worker.instance(), worker.rank(), request.dry_run()));
      response.set_pid(pid);
      break;
    }
    case proto::DrillRequest::KIND_NOT_SET:
      return fail(ErrorCode::kInvalid, "this daemon does not know the drill: it is older");
  }
  if (request.dry_run()) return response;
  log::warn("drill", "pid", response.pid(), "kills",
            request.has_kill_self() ? "this process" : "a worker", "asked_by", peer.node_id,
            "address", peer.address);
  if (request.has_kill_self()) kill_self(executor);
  return response;
}

}  // namespace

void serve_drills(RpcServer& server, boost::asio::any_io_executor executor, DrillOptions options) {
  handle<proto::DRILL>(server,
                       [executor = std::move(executor), options = std::move(options)](
                           Peer peer, proto::DrillRequest request,
                           Events) -> async::Task<Result<proto::DrillResponse>> {
                         co_return answer(executor, options, peer, request);
                       });
}

}  // namespace rekindle::rpc
