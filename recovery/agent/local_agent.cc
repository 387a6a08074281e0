#include "recovery/agent/local_agent.h"

#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <unistd.h>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/this_coro.hpp>

#include "proto/agent.pb.h"
#include "recovery/agent/agent_core.h"
#include "recovery/agent/local_commands.h"
#include "recovery/agent/pull_export.h"
#include "recovery/pull/pull_types.h"
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

// The first SIGINT or SIGTERM cancels the operation that is bound to slot(). The next one ends the
// process as usual. Always in a shared_ptr. On its executor, except for signal().
class Interruption : public std::enable_shared_from_this<Interruption> {
 public:
  explicit Interruption(const boost::asio::any_io_executor& executor)
      : signals_(executor, SIGINT, SIGTERM) {}
  void watch() {
    signals_.async_wait(
        [self = shared_from_this()](const boost::system::error_code& error, int number) {
          if (error) return;
          self->signal_ = number;
          self->signals_.clear();
          self->cancel_.emit(boost::asio::cancellation_type::terminal);
        });
  }
  void stop() {
    boost::system::error_code ignored;
    signals_.clear(ignored);
    signals_.cancel(ignored);
  }
  boost::asio::cancellation_slot slot() { return cancel_.slot(); }
  // Valid once the operation has ended; 0: it was not interrupted.
  int signal() const { return signal_; }

 private:
  boost::asio::signal_set signals_;
  boost::asio::cancellation_signal cancel_;
  int signal_ = 0;
};

// An io_context on its own thread, and blocking calls into it. The calling thread gets progress in
// order.
class ControlThread {
 public:
  ControlThread() : guard_(context_.get_executor()), thread_([this] { context_.run(); }) {}
  ~ControlThread() {
    guard_.reset();
    context_.stop();
    thread_.join();
  }
  ControlThread(const ControlThread&) = delete;
  ControlThread& operator=(const ControlThread&) = delete;

  boost::asio::any_io_executor executor() { return context_.get_executor(); }

  // `start(on_progress)` makes the coroutine. `show` runs on the thread of the caller.
  template <typename T, typename Start>
  T run(Start start, const pull::OnProgress& show,
        const std::shared_ptr<Interruption>& interruption = nullptr) {
    auto shared = std::make_shared<Shared<T>>();
    pull::OnProgress forward = [shared](const pull::Progress& update) { shared->add(update); };
    auto begin = [&]() { return start(std::move(forward)); };
    auto end = [shared, interruption](std::exception_ptr error, T result) {
      if (interruption != nullptr) interruption->stop();
      const std::lock_guard lock(shared->mutex);
      shared->error = std::move(error);
      shared->result.emplace(std::move(result));
      shared->changed.notify_one();
    };
    if (interruption != nullptr) {
      boost::asio::post(context_, [interruption] { interruption->watch(); });
      boost::asio::co_spawn(context_, std::move(begin),
                            boost::asio::bind_cancellation_slot(interruption->slot(), end));
    } else {
      boost::asio::co_spawn(context_, std::move(begin), end);
    }
    shared->show_until_done(show);
    if (shared->error) std::rethrow_exception(shared->error);
    return std::move(*shared->result);
  }

 private:
  template <typename T>
  struct Shared {
    void add(const pull::Progress& update) {
      const std::lock_guard lock(mutex);
      // A newer update replaces an older one, unless that has a note.
      if (!updates.empty() && updates.back().note.empty()) updates.pop_back();
      updates.push_back(update);
      changed.notify_one();
    }
    void show_until_done(const pull::OnProgress& show) {
      std::unique_lock lock(mutex);
      while (true) {
        changed.wait(lock, [&] { return result || !updates.empty(); });
        while (!updates.empty()) {
          const pull::Progress update = std::move(updates.front());
          updates.pop_front();
          lock.unlock();
          if (show) show(update);
          lock.lock();
        }
        if (result) return;
      }
    }
    std::mutex mutex;
    std::condition_variable changed;
    // The mutex guards all members that follow.
    std::deque<pull::Progress> updates;
    std::optional<T> result;
    std::exception_ptr error;
  };

  boost::asio::io_context context_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> guard_;
  std::thread thread_;
};

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
    TRY(auto credentials, rpc::Credentials::open(options.credentials));
    auto agent = std::make_unique<EmbeddedAgent>();
    agent->options_ = options;
    agent->credentials_ = std::move(credentials);
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
      TRY(outcome->summary.left_out,
          export_checkpoint(*outcome->stored, request.to, request.allow_code));
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

  Result<std::uint64_t> release(const std::optional<ModelRef>&, const std::string&) override {
    return fail(ErrorCode::kUnavailable,
                "no agent runs on this host, so there are no resident copies to release");
  }
  Result<proto::LocalSwitchResponse> switch_model(proto::LocalSwitchRequest) override {
    return fail(ErrorCode::kUnavailable, "no agent runs on this host, so no worker can switch");
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
    options.credentials = credentials_;
    options.role = proto::ROLE_PULLER;
    options.rdma = options_.rdma;
    options.rdma.trusted_only = options_.encrypt;
    options.encrypt = options_.encrypt;
    options.tracer = options_.tracer;
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
  std::shared_ptr<rpc::Credentials> credentials_;
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
    const rpc::Identity identity = rpc::make_identity(proto::ROLE_CLIENT, "cli");
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
    return transfer(proto::LOCAL_PUBLISH, to_proto(request).SerializeAsString(), progress, nullptr,
                    request.trace);
  }
  Result<TransferSummary> pull(const PullRequest& request, const OnProgress& progress) override {
    // A release before protocol 3 would ignore it.
    if (request.encrypt && client_->peer().public_key.empty()) {
      return fail(ErrorCode::kUnavailable,
                  "pull --encrypt: the agent of this host is of a release that does not encrypt: "
                  "upgrade it, or give --to DIR");
    }
    const auto interruption = std::make_shared<Interruption>(thread_.executor());
    auto summary = transfer(proto::LOCAL_PULL, to_proto(request).SerializeAsString(), progress,
                            interruption, request.trace);
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
  Result<std::uint64_t> release(const std::optional<ModelRef>& what,
                                const std::string& device) override {
    proto::LocalReleaseRequest request;
    if (what) request.set_model(what->model);
    if (what) request.set_version(what->version.value_or(0));
    request.set_device(device);
    TRY(const auto response, call<proto::LOCAL_RELEASE>(std::move(request), kShortDeadline));
    return response.released();
  }
  Result<proto::LocalSwitchResponse> switch_model(proto::LocalSwitchRequest request) override {
    // The agent's answer says more than the end of the wait for it.
    const std::chrono::milliseconds deadline(request.timeout_ms() + std::uint64_t{5000});
    return call<proto::LOCAL_SWITCH>(std::move(request), deadline);
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
                                   const std::shared_ptr<Interruption>& interruption,
                                   trace::Context parent) {
    auto response = thread_.run<Result<std::string>>(
        [&](OnProgress forward) {
          return call_while_alive(client_, method, body, std::move(forward), parent);
        },
        progress, interruption);
    if (!response) return fail(std::move(response).error());
    TRY(const auto result, rpc::parse_body<proto::TransferResult>(*response));
    return from_proto(result);
  }

  // A call that takes as long as it needs, but not longer than the agent answers others.
  static Task<Result<std::string>> call_while_alive(std::shared_ptr<rpc::RpcClient> client,
                                                    proto::Method method, std::string body,
                                                    OnProgress forward, trace::Context parent) {
    co_await boost::asio::this_coro::throw_if_cancelled(false);
    async::TaskGroup watching(co_await boost::asio::this_coro::executor);
    watching.spawn("agent.watch", close_when_stuck(client));
    // Named, not a temporary: g++ 12 destroys captures of a temporary inside co_await twice.
    std::function<void(std::string)> on_event = [forward](const std::string& event) {
      proto::TransferProgress update;
      if (update.ParseFromString(event)) forward(from_proto(update));
    };
    co_return co_await client->call_raw(method, std::move(body), kTransferDeadline,
                                        std::move(on_event), parent);
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
