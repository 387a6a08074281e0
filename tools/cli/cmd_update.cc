#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "proto/coordinator.pb.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/progress_view.h"
#include "tools/cli/remote.h"
#include "tools/cli/status_view.h"
#include "tools/cli/update_plan_view.h"

namespace rekindle::cli {
namespace {

// One call waits this long for the end of the round.
constexpr std::chrono::milliseconds kStatusWait{500};
// While the coordinator cannot be reached.
constexpr std::chrono::milliseconds kStatusRetry{250};
// Less than a call may take.
constexpr std::chrono::milliseconds kGraceWait{4000};
constexpr std::chrono::milliseconds kLongestGather{600'000};

struct UpdateArgs {
  std::string id;
  std::string group;
  std::string gather = "5s";
  std::string timeout = "10min";
  bool dry_run = false;
  std::string host_rate = "50GB";
  std::string gpu_rate = "50GB";
};

struct Round {
  ModelVersion id;
  std::uint64_t number = 0;
  TimePoint deadline;
  // As the user wrote it.
  std::string timeout;
};

Result<std::chrono::milliseconds> parse_gather(const std::string& text) {
  TRY(const std::chrono::milliseconds gather, parse_duration("--gather", text));
  if (gather.count() > 0 && gather <= kLongestGather) return gather;
  return fail(ErrorCode::kInvalid, "--gather: {} is no time to wait for workers; 1ms to 10min are",
              text);
}

Result<std::uint64_t> begin(Remote& coordinator, const ModelVersion& id, const std::string& group,
                            std::chrono::milliseconds gather, std::chrono::milliseconds timeout) {
  proto::BeginUpdateRequest request;
  request.mutable_id()->set_model(id.model);
  request.mutable_id()->set_version(id.version);
  request.set_group(group);
  request.set_gather_ms(static_cast<std::uint32_t>(gather.count()));
  request.set_wait_ms(static_cast<std::uint32_t>(std::min(timeout, kGraceWait).count()));
  TRY(const auto response, (coordinator.call<proto::COORDINATOR_BEGIN_UPDATE>(request)));
  return response.round();
}

pull::Progress progress_of(const Round& round, const proto::RoundStatus& status) {
  const RoundCounts counts = count(status);
  const bool gathers = status.phase() == "gathering";
  pull::Progress progress;
  progress.phase = fmt::format("{} {} of {}", printable(status.phase()),
                               gathers ? counts.arrived : counts.ready, counts.members);
  progress.id = round.id;
  progress.bytes_done = counts.spread_bytes;
  progress.bytes_total = counts.bytes;
  return progress;
}

Failure unknown_outcome(const Round& round, const Error& why) {
  return fail(
      ErrorCode::kUnavailable,
      "update {}: the outcome of round {} is unknown: {}; see `rekindle status`, and update "
      "again: workers that have the version keep it",
      round.id.to_string(), round.number, why.message());
}

bool worth_asking_again(ErrorCode code) {
  return code == ErrorCode::kUnavailable || code == ErrorCode::kPeerLost ||
         code == ErrorCode::kTimeout || code == ErrorCode::kStale;
}

// Waits until the round is over. An unreachable coordinator does not end the wait: the round goes
// on without it, and the same coordinator may come back.
Result<proto::RoundStatus> wait_for(Remote& coordinator, const Round& round, ProgressView& view) {
  const SteadyClock clock;
  std::optional<proto::RoundStatus> last;
  std::optional<Error> problem;
  while (clock.now() < round.deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(round.deadline - clock.now());
    proto::UpdateStatusRequest request;
    request.set_round(round.number);
    request.set_wait_ms(static_cast<std::uint32_t>(std::min(left, kStatusWait).count()));
    auto status = coordinator.call<proto::COORDINATOR_UPDATE_STATUS>(request);
    if (status) {
      problem.reset();
      last = *std::move(status);
      view.update(progress_of(round, *last));
      if (last->phase() == "over") return *std::move(last);
      continue;
    }
    problem = std::move(status).error();
    if (!worth_asking_again(problem->code())) break;
    std::this_thread::sleep_for(std::min(left, kStatusRetry));
  }
  if (problem) return unknown_outcome(round, *problem);
  const RoundCounts counts = last ? count(*last) : RoundCounts();
  return fail(ErrorCode::kTimeout,
              "update {}: round {} is not over after {} ({} of {} workers ready); it goes on: see "
              "`rekindle status`",
              round.id.to_string(), round.number, round.timeout, counts.ready, counts.members);
}

// The answer to --dry-run: nothing is begun.
Result<int> show_plan(const Settings& settings, const ModelVersion& id, const UpdateArgs& args) {
  LinkRates rates;
  TRY(rates.host, parse_size("--host-rate", args.host_rate));
  TRY(rates.gpu, parse_size("--gpu-rate", args.gpu_rate));
  if (rates.host == 0 || rates.gpu == 0) {
    return fail(ErrorCode::kInvalid, "--host-rate and --gpu-rate: 0 bytes a second bring nothing");
  }
  TRY(const auto coordinator, Remote::create(settings, settings.coordinator));
  proto::PlanUpdateRequest request;
  request.mutable_id()->set_model(id.model);
  request.mutable_id()->set_version(id.version);
  request.set_group(args.group);
  TRY(const auto plan, (coordinator->call<proto::COORDINATOR_PLAN_UPDATE>(request)));
  if (settings.json) {
    print_json(to_json(plan, rates));
  } else {
    print(plan_text(id, plan, rates));
  }
  return kExitOk;
}

Result<int> update(const Settings& settings, const UpdateArgs& args) {
  TRY(const ModelVersion id, parse_model_version(args.id));
  TRY(const std::chrono::milliseconds gather, parse_gather(args.gather));
  TRY(const std::chrono::milliseconds timeout, parse_duration("--timeout", args.timeout));
  if (timeout.count() == 0) {
    return fail(ErrorCode::kInvalid, "--timeout: {} is no time for an update", args.timeout);
  }
  if (settings.coordinator.empty()) {
    return fail(ErrorCode::kInvalid, "give the fleet's --coordinator HOST:PORT");
  }
  if (args.dry_run) return show_plan(settings, id, args);
  TRY(const auto coordinator, Remote::create(settings, settings.coordinator));
  Round round{id, 0, SteadyClock().now() + timeout, args.timeout};
  TRY(round.number, begin(*coordinator, id, args.group, gather, timeout));
  ProgressView view("update", ProgressView::style_for_stderr(settings.quiet));
  TRY(const proto::RoundStatus status, wait_for(*coordinator, round, view));
  view.finish();
  if (settings.json) {
    print_json(to_json(status));
  } else {
    print(update_text(status));
  }
  const RoundCounts counts = count(status);
  return counts.ready == counts.members ? kExitOk : kExitUnavailable;
}

}  // namespace

void add_update(Command& app, Session& session) {
  Command sub = app.command(
      "update",
      "Bring a published version to all workers of a group at once: by broadcast among their "
      "devices\n"
      "where they want the same tensors, or else from their hosts' memory or peers. Ends when all\n"
      "of them serve it or have failed; exit code 5 if some have failed.");
  auto args = std::make_shared<UpdateArgs>();
  sub.option("MODEL@VERSION", args->id, "The version to bring, e.g. qwen3@41").required();
  sub.option("--group", args->group, "Group of workers [every group with workers of the model]")
      .type_name("NAME");
  sub.option("--gather", args->gather,
             "How long workers may take to attach to it; the late ones are left out [5s]")
      .type_name("TIME");
  sub.option("--timeout", args->timeout, "How long to wait for the end [10min]").type_name("TIME");
  sub.flag("--dry-run", args->dry_run,
           "Begin nothing; print who would upload and fetch, and the bytes of each link");
  sub.option("--host-rate", args->host_rate,
             "With --dry-run: bytes a second of each host's network, each way [50GB]")
      .type_name("SIZE");
  sub.option("--gpu-rate", args->gpu_rate,
             "With --dry-run: bytes a second of each GPU's PCIe link [50GB]")
      .type_name("SIZE");
  sub.runs(session, "update", [&session, args] { return update(session.settings, *args); });
}

}  // namespace rekindle::cli
