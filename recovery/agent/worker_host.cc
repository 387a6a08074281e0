#include "recovery/agent/worker_host.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>

#include <boost/asio/post.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/task.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

namespace {

// In the audit log.
constexpr const char* kWorker = "worker";

constexpr std::chrono::milliseconds kConnectWait{1000};
constexpr std::chrono::milliseconds kCallDeadline{3000};
constexpr std::chrono::milliseconds kLongestStatusWait{5000};
// A coordinator that has just started learns the newest version from the reports of its agents.
constexpr std::chrono::milliseconds kAskAgain{200};
constexpr std::chrono::milliseconds kGraceWait{5000};

bool is_away(const Error& error) {
  return error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kTimeout;
}

proto::RankState to_proto(worker::RankReport::State state) {
  switch (state) {
    case worker::RankReport::State::kAttached:
      return proto::RANK_ATTACHED;
    case worker::RankReport::State::kLoaded:
      return proto::RANK_LOADED;
    case worker::RankReport::State::kFailed:
      return proto::RANK_FAILED;
    case worker::RankReport::State::kGone:
      return proto::RANK_GONE;
  }
  return proto::RANK_FAILED;
}

proto::RankReport to_proto(const worker::RankReport& from, const rpc::Identity& self) {
  proto::RankReport report;
  report.set_node_id(self.node_id);
  report.set_incarnation(self.incarnation.to_bytes());
  report.set_instance(from.instance);
  report.set_generation(from.generation);
  report.set_rank(from.rank);
  report.set_world(from.world);
  report.set_model(from.model);
  report.set_latest(!from.version);
  if (from.version) report.set_version(*from.version);
  if (from.has) *report.mutable_has() = rpc::to_proto(*from.has);
  report.set_state(to_proto(from.state));
  report.set_sequence(from.sequence);
  report.set_why(from.why);
  return report;
}

// Opens the file again, even if it was unlinked. Only a copy that waits for a round is opened for
// writing: a committed file that is open for writing keeps the agent from its read lease, and
// pinning a writable mapping changes the times of the file.
Result<UniqueFd> reopen(int fd, bool writable) {
  const std::string path = fmt::format("/proc/self/fd/{}", fd);
  UniqueFd again(::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  if (!again) return fail_errno(errno, "open a segment for the device process");
  return again;
}

Result<std::shared_ptr<rpc::RpcClient>> coordinator_of(AgentCore& core) {
  if (!core.link().configured()) {
    return fail(ErrorCode::kUnavailable, "an update needs a coordinator; give the agent one");
  }
  auto client = core.link().client();
  if (client == nullptr) {
    return fail(ErrorCode::kUnavailable, "the coordinator {} is not reachable: {}",
                core.link().address(), core.link().last_error().message());
  }
  return client;
}

Result<ModelVersion> newest_here(AgentCore& core, const std::string& model) {
  if (const auto version = core.served().newest_version(model)) {
    return ModelVersion{model, *version};
  }
  return fail(ErrorCode::kNotFound, "no version of {} is on this host, and no coordinator to ask",
              model);
}

Result<ModelVersion> newest_without_fleet(AgentCore& core, const std::string& model,
                                          const Error& why) {
  auto here = newest_here(core, model);
  if (here) return here;
  return fail(Error(why).with_context("newest version of " + model));
}

}  // namespace

WorkerHost::WorkerHost(AgentCore& core, device::DeviceLink* devices)
    : core_(core), devices_(devices) {
  if (devices_ != nullptr) core_.served().hold_with(this);
}

WorkerHost::~WorkerHost() { core_.served().hold_with(nullptr); }

void WorkerHost::hold(const Served& served) {
  if (!devices_->wants_copies()) return;
  std::vector<UniqueFd> files;
  std::vector<std::uint64_t> bytes;
  for (const auto& segment : served.segments) {
    const bool writable = served.for_round && !served.complete();
    if (writable) segment->lend_for_writing();
    auto file = reopen(segment->fd(), writable);
    // Without it sessions map the copy themselves, and copy slower.
    if (!file) {
      log::warn("device.hold", "version", served.checkpoint().id.to_string(), "error",
                file.error().message());
      return;
    }
    files.push_back(std::move(*file));
    bytes.push_back(segment->bytes().size());
  }
  devices_->hold(served.number, std::move(files), std::move(bytes));
}

void WorkerHost::hold_reserve(const store::MappedSegment& segment,
                              boost::asio::any_io_executor executor) {
  // Copies have numbers from 1 on.
  constexpr std::uint64_t kFirstNumber = std::uint64_t{1} << 63;
  if (devices_ == nullptr) return;
  auto file = reopen(segment.fd(), false);
  if (!file) {
    log::warn("device.hold", "file", segment.path().string(), "error", file.error().message());
    return;
  }
  const std::uint64_t number = kFirstNumber + reserve_files_.fetch_add(1);
  const auto on_control_thread = [alive = std::weak_ptr(lifetime_),
                                  executor](std::function<void()> work) {
    boost::asio::post(executor, [alive, work = std::move(work)] {
      if (!alive.expired()) work();
    });
  };
  const auto shared = std::make_shared<UniqueFd>(std::move(*file));
  on_control_thread([this, number, shared, bytes = segment.bytes().size()] {
    if (!devices_->wants_copies()) return;
    std::vector<UniqueFd> files;
    files.push_back(std::move(*shared));
    devices_->hold(number, std::move(files), {bytes});
  });
  segment.life()->at_end([this, number, on_control_thread] {
    on_control_thread([this, number] { devices_->drop(number, device::Pages::kGone); });
  });
}

Result<UniqueFd> WorkerHost::serve_device(device::DeviceOrder order) {
  if (devices_ == nullptr) return worker::Host::serve_device(std::move(order));
  return devices_->serve(std::move(order));
}

void WorkerHost::tell_device(std::uint64_t session, const TileRuns& verified, bool complete) {
  if (devices_ != nullptr) devices_->tell(session, verified, complete);
}

void WorkerHost::end_device(std::uint64_t session, bool gone) {
  if (devices_ != nullptr) devices_->end(session, gone);
}

void WorkerHost::spread_device(const device::SpreadOrder& order) {
  if (devices_ != nullptr) devices_->spread(order);
}

void WorkerHost::check_blocks(const std::string& device, std::vector<bucket::BlockFile> blocks,
                              std::function<void(Result<std::vector<Digest>>)> on_checked) {
  if (devices_ == nullptr) {
    return worker::Host::check_blocks(device, std::move(blocks), std::move(on_checked));
  }
  devices_->check_blocks(device, std::move(blocks), std::move(on_checked));
}

void WorkerHost::copy_block(const std::string& device, bucket::BlockFile block, std::string data,
                            std::function<void(Result<std::string>)> on_copied) {
  if (devices_ == nullptr) {
    return worker::Host::copy_block(device, std::move(block), std::move(data),
                                    std::move(on_copied));
  }
  devices_->copy_block(device, std::move(block), std::move(data), std::move(on_copied));
}

void WorkerHost::stop_spread(std::uint64_t session, const std::string& why) {
  if (devices_ != nullptr) devices_->stop_spread(session, why);
}

void WorkerHost::make_meeting_id(std::uint64_t number) {
  if (devices_ != nullptr) devices_->make_meeting_id(number);
}

std::string WorkerHost::device_life() const {
  return devices_ != nullptr ? devices_->life() : std::string();
}

Result<std::vector<std::string>> WorkerHost::homes_near(const std::string& device) {
  if (core_.rdma() == nullptr) return worker::Host::homes_near(device);
  return core_.rdma()->homes_near_gpu(device);
}

Result<transport::DeviceLanding> WorkerHost::land_in_device(int fd, std::uint64_t bytes,
                                                            std::vector<std::string> homes) {
  if (core_.rdma() == nullptr) return worker::Host::land_in_device(fd, bytes, std::move(homes));
  return core_.rdma()->connector().use_device_memory(fd, bytes, homes);
}

void WorkerHost::bucket_landed(std::uint64_t session, std::size_t bucket) {
  if (devices_ != nullptr) devices_->bucket_landed(session, bucket);
}

void WorkerHost::reads_over(std::uint64_t session, const std::string& why) {
  if (devices_ != nullptr) devices_->reads_over(session, why);
}

Task<Result<proto::RoundOrders>> WorkerHost::report_rounds(proto::RoundReport report) {
  CO_TRY(const auto client, coordinator_of(core_));
  report.set_node_id(core_.identity().node_id);
  report.set_incarnation(core_.identity().incarnation.to_bytes());
  const auto deadline = std::chrono::milliseconds(report.wait_ms()) + kCallDeadline;
  co_return co_await rpc::call<proto::COORDINATOR_ROUND>(client, std::move(report), deadline);
}

Task<Result<std::uint64_t>> WorkerHost::begin_update(ModelVersion id, std::string group,
                                                     std::chrono::milliseconds gather,
                                                     std::uint32_t members) {
  CO_TRY(const auto client, coordinator_of(core_));
  proto::BeginUpdateRequest request;
  request.set_members(members);
  *request.mutable_id() = rpc::to_proto(id);
  request.set_group(std::move(group));
  request.set_gather_ms(static_cast<std::uint32_t>(gather.count()));
  CO_TRY(const auto response, co_await rpc::call<proto::COORDINATOR_BEGIN_UPDATE>(
                                  client, std::move(request), kCallDeadline));
  co_return response.round();
}

Task<Result<proto::RoundStatus>> WorkerHost::update_status(std::uint64_t round,
                                                           std::chrono::milliseconds wait) {
  CO_TRY(const auto client, coordinator_of(core_));
  wait = std::clamp(wait, std::chrono::milliseconds(0), kLongestStatusWait);
  proto::UpdateStatusRequest request;
  request.set_round(round);
  request.set_wait_ms(static_cast<std::uint32_t>(wait.count()));
  co_return co_await rpc::call<proto::COORDINATOR_UPDATE_STATUS>(client, std::move(request),
                                                                 wait + kCallDeadline);
}

// Without a coordinator a worker gets the newest version of its host. A coordinator that has just
// started may not know the newest version yet. This waits until it does: a restart of the
// coordinator must not turn `latest` back.
Task<Result<ModelVersion>> WorkerHost::newest(std::string model) {
  if (!core_.link().configured()) co_return newest_here(core_, model);
  proto::ResolveRequest request;
  request.set_model(model);
  const auto give_up = std::chrono::steady_clock::now() + kGraceWait;
  for (;;) {
    const auto client = co_await core_.link().wait_connected(kConnectWait);
    if (!client) co_return newest_without_fleet(core_, model, client.error());
    const auto answer =
        co_await rpc::call<proto::COORDINATOR_RESOLVE>(*client, request, kCallDeadline);
    if (answer) co_return rpc::from_proto(answer->id());
    const Error& error = answer.error();
    if (is_away(error)) co_return newest_without_fleet(core_, model, error);
    if (error.code() == ErrorCode::kNotFound) {
      co_return fail(ErrorCode::kNotFound, "no version of {} is ready in the fleet; publish one",
                     model);
    }
    const bool cancelled = co_await async::is_cancelled();
    if (error.code() != ErrorCode::kUnavailable || cancelled ||
        std::chrono::steady_clock::now() > give_up) {
      co_return fail(Error(error).with_context("newest version of " + model));
    }
    co_await async::sleep_for(kAskAgain);
  }
}

// The coordinator names draining versions in its answers to heartbeats. Present sessions go on.
Result<void> WorkerHost::may_attach(const ModelVersion& id) const {
  if (!core_.served().draining().contains(id)) return {};
  return fail(ErrorCode::kStale, "it is being retired in the fleet; attach to another version");
}

std::optional<Digest> WorkerHost::root_here(const ModelVersion& id) const {
  for (const Served* served : core_.served().find(id)) {
    if (served->complete()) return served->checkpoint().root;
  }
  return std::nullopt;
}

Task<Result<std::shared_ptr<const store::StoredVersion>>> WorkerHost::pull(
    pull::PullRequest request, pull::OnProgress progress, pull::PullWatch watch) {
  const std::string wanted = request.ref.to_string();
  auto pulling = core_.pulls().pull(std::move(request), std::move(progress), std::move(watch));
  auto pulled = co_await std::move(pulling);
  if (!pulled && pulled.error().code() == ErrorCode::kDenied) {
    core_.audit().note_some({.act = "worker_pull",
                             .result = pulled.error().message(),
                             .object = wanted,
                             .role = kWorker});
  }
  CO_TRY(auto outcome, std::move(pulled));
  log::info("worker.pulled", "version", outcome.summary.id.to_string(), "bytes",
            outcome.summary.bytes, "fetched_bytes", outcome.summary.fetched_bytes);
  co_return std::move(outcome.stored);
}

Task<Result<Digest>> WorkerHost::publish(ModelVersion id, store::FilledSegments filled) {
  CO_TRY(const auto summary,
         co_await core_.publisher().publish_filled(std::move(id), std::move(filled)));
  co_return summary.root;
}

void WorkerHost::publication_ended(const worker::Publisher& by, const ModelVersion& id,
                                   const Result<void>& outcome) {
  core_.audit().note({.act = "worker_publish",
                      .result = outcome ? "ok" : outcome.error().message(),
                      .object = id.to_string(),
                      .principals = {fmt::format("uid:{}", by.uid)},
                      .role = kWorker,
                      .address = fmt::format("pid:{}", by.pid)});
}

Task<Result<worker::InstanceVerdict>> WorkerHost::report(worker::RankReport from) {
  if (!core_.link().configured()) co_return fail(ErrorCode::kPeerLost, "no coordinator");
  const auto client = core_.link().client();
  if (client == nullptr) co_return fail(ErrorCode::kPeerLost, "the coordinator is not reachable");
  const auto request = to_proto(from, core_.identity());
  CO_TRY(const auto response,
         co_await rpc::call<proto::COORDINATOR_REPORT_RANK>(client, request, kCallDeadline));
  worker::InstanceVerdict said;
  CO_TRY(said.id, rpc::from_proto(response.id()));
  said.why = response.why();
  said.term = core_.link().epoch();
  said.state =
      response.state() == proto::INSTANCE_COMMITTED ? worker::InstanceVerdict::State::kCommitted
      : response.state() == proto::INSTANCE_UNFIT   ? worker::InstanceVerdict::State::kUnfit
                                                    : worker::InstanceVerdict::State::kLoading;
  co_return said;
}

}  // namespace rekindle::agent
