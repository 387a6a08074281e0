#include "recovery/agent/local_agent.h"

#include <cstdlib>
#include <functional>
#include <optional>
#include <utility>

#include <unistd.h>

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>

#include "proto/agent.pb.h"
#include "recovery/agent/agent_core.h"
#include "recovery/agent/control_thread.h"
#include "recovery/agent/export.h"
#include "recovery/agent/local_commands.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/grants.h"
#include "recovery/rpc/methods.h"
#include "src/async/task.h"
#include "src/async/task_group.h"

namespace rekindle::agent {

namespace {

using async::Task;

constexpr std::chrono::milliseconds kDialDeadline{2000};
// A publish or pull checks its own deadlines. This only bounds the call.
constexpr std::chrono::hours kTransferDeadline{24};
constexpr std::chrono::milliseconds kShortDeadline{30000};
constexpr std::chrono::milliseconds kAgentCheckInterval{2000};
constexpr std::chrono::milliseconds kAgentAnswerDeadline{10000};

Error interrupted_error(const pull::PullRequest& request) {
  return {ErrorCode::kUnavailable,
          fmt::format("pull {}: interrupted; verified bytes are kept, and the same command goes "
                      "on from there",
                      request.ref.to_string())};
}

// A directory for the store of a process that only asks. The destructor removes it.
class ScratchDirectory {
 public:
  ~ScratchDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  Result<std::filesystem::path> make() {
    std::error_code error;
    std::string name = (std::filesystem::temp_directory_path(error) / "rekindle-XXXXXX").string();
    if (error || ::mkdtemp(name.data()) == nullptr) return fail_errno(errno, "create " + name);
    path_ = name;
    return path_;
  }

 private:
  std::filesystem::path path_;
};

class EmbeddedAgent final : public LocalAgent {
 public:
  static Result<std::unique_ptr<LocalAgent>> open(const LocalAgentOptions& options) {
    TRY(const auto secret, rpc::read_secret(options.secret_file));
    auto agent = std::make_unique<EmbeddedAgent>();
    agent->options_ = options;
    agent->secret_ = secret;
    return std::unique_ptr<LocalAgent>(std::move(agent));
  }
  ~EmbeddedAgent() override { close(); }

  bool embedded() const override { return true; }

  Result<TransferSummary> publish(const PublishRequest& request,
                                  const OnProgress& progress) override {
    TRY_VOID(ensure(options_.store_directory));
    return thread_.run<Result<TransferSummary>>(
        [&](OnProgress forward) { return core_->publisher().publish(request, std::move(forward)); },
        progress);
  }

  Result<TransferSummary> pull(const PullRequest& request, const OnProgress& progress) override {
    const bool to_directory = !request.to.empty();
    std::error_code ignored;
    const bool is_new = to_directory && !std::filesystem::exists(request.to, ignored);
    if (to_directory) TRY_VOID(check_export_target(request.to));
    TRY_VOID(ensure(to_directory ? export_store(request.to) : options_.store_directory));
    const auto interruption = std::make_shared<Interruption>(thread_.executor());
    auto outcome = thread_.run<Result<pull::PullJob::Outcome>>(
        [&](OnProgress forward) { return core_->pulls().pull(request, std::move(forward)); },
        progress, interruption);
    if (!outcome) {
      if (to_directory) drop_unused_store(request.to);
      // Fails when something is in it, and then it stays.
      if (is_new) std::filesystem::remove(request.to, ignored);
      interrupted_by_ = interruption->signal();
      if (interrupted_by_ != 0) return fail(interrupted_error(request));
      return fail(std::move(outcome).error());
    }
    if (to_directory) {
      close();
      TRY_VOID(export_checkpoint(*outcome->stored, request.to));
      outcome->summary.path = request.to;
    }
    return std::move(outcome->summary);
  }
  int interrupted_by() const override { return interrupted_by_; }

  // Leaves nothing behind: it does not make a store that does not exist.
  Result<PlanSummary> plan(const PullRequest& request) override {
    ScratchDirectory scratch;
    std::filesystem::path store = options_.store_directory;
    std::error_code ignored;
    if (!request.to.empty() || !std::filesystem::exists(store, ignored)) {
      TRY(store, scratch.make());
    }
    TRY_VOID(ensure(store));
    auto plan = thread_.run<Result<PlanSummary>>(
        [&](const OnProgress&) { return core_->pulls().plan(request); }, {});
    close();
    return plan;
  }

  Result<std::uint64_t> retire(const ModelVersion& id) override {
    TRY_VOID(ensure(options_.store_directory));
    return thread_.run<Result<std::uint64_t>>(
        [&](const OnProgress&) { return core_->retirement().retire(id); }, {});
  }

  Result<std::vector<proto::CopyStatus>> verify(const ModelVersion& id) override {
    TRY_VOID(ensure(options_.store_directory));
    return thread_.run<Result<std::vector<proto::CopyStatus>>>(
        [&](const OnProgress&) { return core_->health().verify(id); }, {});
  }

 private:
  Result<void> ensure(const std::filesystem::path& store) {
    if (core_ != nullptr && open_store_ == store) return {};
    close();
    CoreOptions options;
    options.node_id = fmt::format("{}-{}", default_node_id(), ::getpid());
    options.store_directory = store;
    options.store_budget_bytes = options_.store_budget_bytes;
    options.coordinator = options_.coordinator;
    options.secret = secret_;
    options.role = proto::ROLE_PULLER;
    options.rdma = options_.rdma;
    TRY(core_, AgentCore::create(thread_.executor(), options));
    open_store_ = store;
    thread_.run<bool>(
        [this](const OnProgress&) -> Task<bool> {
          core_->connect_coordinator("", "");
          co_return true;
        },
        {});
    return {};
  }

  void close() {
    if (core_ == nullptr) return;
    thread_.run<bool>(
        [this](const OnProgress&) -> Task<bool> {
          co_await core_->stop();
          co_return true;
        },
        {});
    core_.reset();
  }

  LocalAgentOptions options_;
  std::string secret_;
  ControlThread thread_;
  std::filesystem::path open_store_;
  std::unique_ptr<AgentCore> core_;
  int interrupted_by_ = 0;
};

// Commands to the agent that owns the store.
class ConnectedAgent final : public LocalAgent {
 public:
  bool embedded() const override { return false; }

  Result<void> connect(const LocalAgentOptions& options) {
    rpc::Identity identity;
    identity.role = proto::ROLE_CLIENT;
    identity.node_id = "cli";
    identity.incarnation = Incarnation::random();
    TRY(identity.secret, rpc::read_secret(options.secret_file));
    const std::string address = "unix:" + agent_socket(options.store_directory).string();
    TRY(client_, thread_.run<Result<std::shared_ptr<rpc::RpcClient>>>(
                     [&](const OnProgress&) {
                       return rpc::RpcClient::connect(address, identity, kDialDeadline);
                     },
                     {}));
    return {};
  }
  ~ConnectedAgent() override {
    if (client_ == nullptr) return;
    // Closed and destroyed on the thread that uses it.
    boost::asio::post(thread_.executor(), [client = std::move(client_)] { client->close(); });
  }

  Result<TransferSummary> publish(const PublishRequest& request,
                                  const OnProgress& progress) override {
    return transfer(proto::LOCAL_PUBLISH, to_proto(request).SerializeAsString(), progress, nullptr);
  }
  Result<TransferSummary> pull(const PullRequest& request, const OnProgress& progress) override {
    const auto interruption = std::make_shared<Interruption>(thread_.executor());
    auto summary =
        transfer(proto::LOCAL_PULL, to_proto(request).SerializeAsString(), progress, interruption);
    if (!summary) interrupted_by_ = interruption->signal();
    if (interrupted_by_ != 0) return fail(interrupted_error(request));
    return summary;
  }
  int interrupted_by() const override { return interrupted_by_; }
  Result<PlanSummary> plan(const PullRequest& request) override {
    TRY(const auto response, call<proto::LOCAL_PLAN>(to_proto(request), kShortDeadline));
    return from_proto(response);
  }
  Result<std::uint64_t> retire(const ModelVersion& id) override {
    proto::LocalRetireRequest request;
    *request.mutable_id() = rpc::to_proto(id);
    TRY(const auto response, call<proto::LOCAL_RETIRE>(std::move(request), kShortDeadline));
    return response.freed_bytes();
  }
  Result<std::vector<proto::CopyStatus>> verify(const ModelVersion& id) override {
    proto::LocalVerifyRequest request;
    *request.mutable_id() = rpc::to_proto(id);
    TRY(const auto response, call<proto::LOCAL_VERIFY>(std::move(request), kTransferDeadline));
    return std::vector(response.copies().begin(), response.copies().end());
  }

 private:
  template <proto::Method method>
  Result<rpc::ResponseOf<method>> call(rpc::RequestOf<method> request,
                                       std::chrono::milliseconds deadline) {
    return thread_.run<Result<rpc::ResponseOf<method>>>(
        [&](const OnProgress&) { return rpc::call<method>(client_, std::move(request), deadline); },
        {});
  }

  Result<TransferSummary> transfer(proto::Method method, const std::string& body,
                                   const OnProgress& progress,
                                   const std::shared_ptr<Interruption>& interruption) {
    auto response = thread_.run<Result<std::string>>(
        [&](OnProgress forward) {
          return call_while_alive(client_, method, body, std::move(forward));
        },
        progress, interruption);
    if (!response) return fail(std::move(response).error());
    TRY(const auto result, rpc::parse_body<proto::TransferResult>(*response));
    return from_proto(result);
  }

  // A call that takes as long as it needs, but not longer than the agent answers others.
  static Task<Result<std::string>> call_while_alive(std::shared_ptr<rpc::RpcClient> client,
                                                    proto::Method method, std::string body,
                                                    OnProgress forward) {
    co_await boost::asio::this_coro::throw_if_cancelled(false);
    async::TaskGroup watching(co_await boost::asio::this_coro::executor);
    watching.spawn("agent.watch", close_when_stuck(client));
    // Named, not a temporary: g++ 12 destroys captures of a temporary inside co_await twice.
    std::function<void(std::string)> on_event = [forward](const std::string& event) {
      proto::TransferProgress update;
      if (update.ParseFromString(event)) forward(from_proto(update));
    };
    co_return co_await client->call_raw(method, std::move(body), kTransferDeadline,
                                        std::move(on_event));
  }

  // Ends the calls of an agent that is stopped or stuck, by closing their connection.
  static Task<void> close_when_stuck(std::shared_ptr<rpc::RpcClient> client) {
    while (client->connected()) {
      co_await async::sleep_for(kAgentCheckInterval);
      const auto answer = co_await rpc::call<proto::AGENT_STATUS>(client, {}, kAgentAnswerDeadline);
      if (!answer && answer.error().code() == ErrorCode::kTimeout) client->close();
    }
  }

  ControlThread thread_;
  std::shared_ptr<rpc::RpcClient> client_;
  int interrupted_by_ = 0;
};

}  // namespace

std::filesystem::path agent_socket(const std::filesystem::path& store_directory) {
  return store_directory / "agent" / "agent.sock";
}

Result<std::unique_ptr<LocalAgent>> open_local_agent(const LocalAgentOptions& options) {
  std::error_code error;
  if (!options.embedded_only &&
      std::filesystem::exists(agent_socket(options.store_directory), error)) {
    auto agent = std::make_unique<ConnectedAgent>();
    auto connected = agent->connect(options);
    if (connected) return std::unique_ptr<LocalAgent>(std::move(agent));
    // A killed agent leaves a socket without a process behind it. Any other failure is an error.
    if (connected.error().code() != ErrorCode::kPeerLost) return fail(std::move(connected).error());
  }
  return EmbeddedAgent::open(options);
}

}  // namespace rekindle::agent
