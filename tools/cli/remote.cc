#include "tools/cli/remote.h"

#include <exception>
#include <optional>

#include <unistd.h>

#include "recovery/rpc/address.h"
#include "recovery/rpc/grants.h"

namespace rekindle::cli {
namespace {

constexpr std::chrono::milliseconds kConnectDeadline{3000};
constexpr std::chrono::milliseconds kCallDeadline{5000};

}  // namespace

Result<std::unique_ptr<Remote>> Remote::create(const Settings& settings, std::string address) {
  std::unique_ptr<Remote> remote(new Remote);
  remote->address_ = std::move(address);
  remote->identity_.role = proto::ROLE_CLIENT;
  remote->identity_.node_id = fmt::format("client-{}", ::getpid());
  remote->identity_.incarnation = Incarnation::random();
  TRY(remote->identity_.secret, rpc::read_secret(settings.secret_file));
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
  std::optional<Result<std::string>> outcome;
  std::exception_ptr failure;
  boost::asio::co_spawn(io_, exchange(method, std::move(body)),
                        [&](std::exception_ptr thrown, Result<std::string> result) {
                          failure = thrown;
                          outcome = std::move(result);
                        });
  // Not run(), because the coroutines of the connection do not end between calls.
  io_.restart();
  while (!outcome && !failure) {
    if (io_.run_one() == 0) break;
  }
  if (failure) std::rethrow_exception(failure);
  if (!outcome) return fail(ErrorCode::kInternal, "call to {} ended without an answer", address_);
  return *std::move(outcome);
}

Interrupts::Interrupts() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  sigprocmask(SIG_BLOCK, &signals_, nullptr);
}

bool Interrupts::within(std::chrono::milliseconds pause) const {
  const timespec time{.tv_sec = pause.count() / 1000, .tv_nsec = pause.count() % 1000 * 1'000'000};
  return ::sigtimedwait(&signals_, nullptr, &time) > 0;
}

}  // namespace rekindle::cli
