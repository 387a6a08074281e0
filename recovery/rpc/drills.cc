#include "recovery/rpc/drills.h"

#include <cerrno>
#include <csignal>
#include <memory>
#include <utility>

#include <unistd.h>

#include <boost/asio/steady_timer.hpp>
#include <time.h>

#include "proto/drill.pb.h"
#include "recovery/rpc/methods.h"
#include "src/base/log.h"

namespace rekindle::rpc {
namespace {

// For the answer to leave this process.
constexpr std::chrono::milliseconds kAnswerTime{200};
constexpr std::uint32_t kLongestFreeze = 60'000;
constexpr int kKilled = 128 + SIGKILL;

template <typename Act>
void after_the_answer(const boost::asio::any_io_executor& executor, Act act) {
  const auto timer = std::make_shared<boost::asio::steady_timer>(executor, kAnswerTime);
  timer->async_wait([timer, act](const boost::system::error_code&) { act(); });
}

// Stops all threads of this process. A timer of the kernel sends SIGCONT, which reaches a stopped
// process.
Result<void> freeze(std::uint32_t milliseconds) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGCONT;
  timer_t timer{};
  if (::timer_create(CLOCK_MONOTONIC, &event, &timer) != 0)
    return fail_errno(errno, "timer_create");
  itimerspec end{};
  end.it_value.tv_sec = milliseconds / 1000;
  end.it_value.tv_nsec = static_cast<long>(milliseconds % 1000) * 1'000'000;
  // Again, if this thread is so late that the first one comes before it stops.
  end.it_interval.tv_sec = 1;
  const bool armed = ::timer_settime(timer, 0, &end, nullptr) == 0;
  const int why = errno;
  if (armed) ::kill(::getpid(), SIGSTOP);
  ::timer_delete(timer);
  return armed ? Result<void>() : fail_errno(why, "timer_settime");
}

void freeze_and_log(std::uint32_t milliseconds) {
  if (const auto frozen = freeze(milliseconds); !frozen) {
    log::error("drill", "freeze", frozen.error());
  } else {
    log::warn("drill", "frozen_ms", milliseconds, "now", "runs again");
  }
}

bool concerns_data(const proto::DrillRequest& request) {
  return request.has_bench_read() || request.has_open_bench() || request.has_cut_links() ||
         request.has_list_routes();
}

// The other end of a benchmark, which its caller was allowed to begin.
bool is_help_between_agents(const Peer& peer, const proto::DrillRequest& request) {
  return request.has_open_bench() && peer.role == proto::ROLE_AGENT;
}

Result<void> check_allowed(const DrillOptions& options, const proto::DrillRequest& request) {
  if (!options.allowed) {
    return fail(ErrorCode::kDenied,
                "this daemon allows no drills; start it with --allow-drills where they are meant");
  }
  if (concerns_data(request) && !options.data) {
    return fail(ErrorCode::kInvalid, "a coordinator reads no data: ask an agent");
  }
  return {};
}

Result<proto::DrillResponse> answer(const boost::asio::any_io_executor& executor,
                                    const DrillOptions& options, const Peer& peer,
                                    const proto::DrillRequest& request) {
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
    case proto::DrillRequest::kFreeze:
      // The kernel does not stop the first process of a PID namespace.
      if (::getpid() == 1) {
        return fail(
            ErrorCode::kUnavailable,
            "a daemon that is process 1 cannot freeze; start its container with an init, or "
            "its Pod with shareProcessNamespace");
      }
      if (request.freeze().milliseconds() == 0 ||
          request.freeze().milliseconds() > kLongestFreeze) {
        return fail(ErrorCode::kInvalid, "a freeze lasts 1 to {} ms", kLongestFreeze);
      }
      response.set_pid(static_cast<std::uint32_t>(::getpid()));
      break;
    case proto::DrillRequest::kBenchRead:
    case proto::DrillRequest::kOpenBench:
    case proto::DrillRequest::kCutLinks:
    case proto::DrillRequest::kListRoutes:
    case proto::DrillRequest::KIND_NOT_SET:
      return fail(ErrorCode::kInvalid, "this daemon does not know the drill: it is older");
  }
  if (request.dry_run()) return response;
  log::warn("drill", "asked_by", peer.node_id, "address", peer.address, "does",
            request.ShortDebugString());
  if (request.has_kill_self()) {
    after_the_answer(executor, [] {
      ::kill(::getpid(), SIGKILL);
      // Process 1 of a container survives its own signal.
      ::_exit(kKilled);
    });
  } else if (request.has_freeze()) {
    after_the_answer(executor, [ms = request.freeze().milliseconds()] { freeze_and_log(ms); });
  }
  return response;
}

}  // namespace

void serve_drills(RpcServer& server, boost::asio::any_io_executor executor, DrillOptions options) {
  handle<proto::DRILL>(server,
                       [executor = std::move(executor), options = std::move(options)](
                           Peer peer, proto::DrillRequest request,
                           Events) -> async::Task<Result<proto::DrillResponse>> {
                         CO_TRY_VOID(check_allowed(options, request));
                         if (options.admit && !is_help_between_agents(peer, request)) {
                           auto admitting = options.admit(peer);
                           CO_TRY_VOID(co_await std::move(admitting));
                         }
                         if (concerns_data(request)) {
                           auto data = options.data(std::move(peer), std::move(request));
                           co_return co_await std::move(data);
                         }
                         co_return answer(executor, options, peer, request);
                       });
}

}  // namespace rekindle::rpc
