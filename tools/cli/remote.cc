#include "tools/cli/remote.h"

#include <algorithm>
#include <exception>
#include <optional>

#include <unistd.h>

#include "recovery/rpc/address.h"
#include "recovery/rpc/credentials.h"
#include "src/base/clock.h"

namespace rekindle::cli {
namespace {

constexpr std::chrono::milliseconds kConnectDeadline{3000};
constexpr std::chrono::milliseconds kCallDeadline{5000};
constexpr std::chrono::milliseconds kAskEvery{50};
// For a call that was ended early to return.
constexpr std::chrono::milliseconds kInterruptedDeadline{100};

}  // namespace

Result<rpc::Identity> command_identity(const Settings& settings) {
  TRY(auto credentials, rpc::Credentials::open(settings.credentials));
  return rpc::make_identity(proto::ROLE_CLIENT, fmt::format("client-{}", ::getpid()),
                            std::move(credentials));
}

Result<std::unique_ptr<Remote>> Remote::create(const Settings& settings, std::string address) {
  std::unique_ptr<Remote> remote(new Remote);
  remote->address_ = std::move(address);
  TRY(remote->identity_, command_identity(settings));
  return remote;
}

// Connects to the first address that answers, because only the coordinator that leads listens.
async::Task<Result<std::shared_ptr<rpc::RpcClient>>> Remote::connect() {
  if (address_.starts_with(rpc::kUnixPrefix)) {
    co_return co_await rpc::RpcClient::connect(address_, identity_, kConnectDeadline);
  }
  CO_TRY(const auto addresses, rpc::parse_addresses(address_));
  std::optional<Error> problem;
  for (const std::string& address : addresses) {
    auto client = co_await rpc::RpcClient::connect(address, identity_, kConnectDeadline);
    if (client) co_return client;
    problem = client.error();
  }
  co_return fail(std::move(*problem));
}

async::Task<Result<std::string>> Remote::exchange(proto::Method method, std::string body) {
  if (client_ == nullptr || !client_->connected()) {
    CO_TRY(client_, co_await connect());
  }
  co_return co_await client_->call_raw(method, std::move(body), kCallDeadline);
}

Result<std::string> Remote::call_raw(proto::Method method, std::string body) {
  struct Ended {
    std::optional<Result<std::string>> outcome;
    std::exception_ptr failure;
  };
  // Learns of the end of a connection that its server has closed since the last call.
  io_.restart();
  (void)io_.poll();
  // Shared, because the answer may come after an early end of the call.
  const auto ended = std::make_shared<Ended>();
  boost::asio::co_spawn(io_, exchange(method, std::move(body)),
                        [ended](std::exception_ptr thrown, Result<std::string> result) {
                          ended->failure = thrown;
                          ended->outcome = std::move(result);
                        });
  // Not run(), because the coroutines of the connection do not end between calls.
  io_.restart();
  TimePoint ask_at = steady_now() + kAskEvery;
  while (!ended->outcome && !ended->failure) {
    (void)io_.run_one_until(ask_at);
    if (steady_now() < ask_at) {
      if (io_.stopped()) break;
      continue;
    }
    if (!goes_on_()) {
      if (client_ != nullptr) client_->close();
      const TimePoint give_up = steady_now() + kInterruptedDeadline;
      while (!ended->outcome && steady_now() < give_up) (void)io_.run_one_until(give_up);
      return fail(ErrorCode::kUnavailable, "the call to {} was interrupted", address_);
    }
    ask_at = steady_now() + kAskEvery;
  }
  if (ended->failure) std::rethrow_exception(ended->failure);
  if (!ended->outcome) {
    return fail(ErrorCode::kInternal, "call to {} ended without an answer", address_);
  }
  return *std::move(ended->outcome);
}

Interrupts::Interrupts() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  sigprocmask(SIG_BLOCK, &signals_, nullptr);
}

bool Interrupts::within(std::chrono::milliseconds pause) {
  const timespec time{.tv_sec = pause.count() / 1000, .tv_nsec = pause.count() % 1000 * 1'000'000};
  if (signal_ == 0) signal_ = std::max(::sigtimedwait(&signals_, nullptr, &time), 0);
  return signal_ != 0;
}

}  // namespace rekindle::cli
