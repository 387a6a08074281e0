// Transfer: sessions and paths.
#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "recovery/pull/memory_path.h"
#include "recovery/pull/transfer.h"
#include "recovery/pull/transports.h"
#include "src/async/offload.h"
#include "src/async/task_group.h"
#include "src/base/log.h"

namespace rekindle::pull {

using transport::SourceIndex;

namespace {

constexpr std::chrono::milliseconds kSessionDeadline{1500};
constexpr std::chrono::milliseconds kConnectDeadline{2000};
constexpr std::uint32_t kPathsPerSource = 4;

struct MadePaths {
  std::vector<std::unique_ptr<transport::Path>> paths;
  std::optional<Error> error;
};

// The first path decides; more are worth having, not worth failing for. Blocks until `deadline` at
// most.
MadePaths make_paths(transport::Connector& connector, const transport::PathTarget& target,
                     std::uint32_t wanted, TimePoint deadline) {
  MadePaths made;
  while (made.paths.size() < wanted && !made.error) {
    auto path = connector.connect(target, deadline);
    if (path) {
      made.paths.push_back(std::move(*path));
    } else {
      made.error = std::move(path).error();
    }
  }
  return made;
}

}  // namespace

void Transfer::start_connecting(SourceIndex index) {
  ++connecting_;
  sources_[index].connecting = true;
  boost::asio::co_spawn(environment_.executor, connect_source(index), boost::asio::detached);
}

async::Task<void> Transfer::connect_source(SourceIndex index) {
  ActiveSource& source = sources_[index];
  Result<void> opened = co_await renew(source);
  if (opened) opened = co_await open_paths(source, index);
  source.connecting = false;
  --connecting_;
  if (opened) follow(index);
  if (!opened) lose(index, opened.error().message());
  timer_->cancel();
}

// What is left of an earlier connection in this transfer is given back, or made new.
async::Task<Result<void>> Transfer::renew(ActiveSource& source) {
  if (source.peer == nullptr) co_return Result<void>();
  if (source.session) {
    boost::asio::co_spawn(environment_.executor,
                          SourcePeer::close_session(source.peer, source.session->token),
                          boost::asio::detached);
    source.session.reset();
  }
  if (source.peer->connected()) co_return Result<void>();
  const auto deadline = silence_.at_most(kSessionDeadline, std::chrono::steady_clock::now());
  CO_TRY(source.peer, co_await SourcePeer::connect(source.record, environment_.identity, deadline));
  co_return Result<void>();
}

std::vector<std::string> Transfer::transports_of(const ActiveSource& source) const {
  const bool same_host = !environment_.self.host_id().empty() &&
                         environment_.self.host_id() == source.record.node().host_id();
  return transports_for({.forced = forced_transport_,
                         .same_host = same_host,
                         .used = source.used,
                         .avoid = source.avoid},
                        environment_.handshakes);
}

async::Task<Result<void>> Transfer::open_paths(ActiveSource& source, SourceIndex index) {
  if (source.peer == nullptr) {
    open_local(source, index);
    co_return Result<void>();
  }
  const auto deadline = silence_.at_most(kSessionDeadline, std::chrono::steady_clock::now());
  SourcePeer::SessionRequest wanted{environment_.self, id_, root_, source.record.grant(),
                                    transports_of(source)};
  auto session_opened = co_await source.peer->open_session(std::move(wanted), deadline);
  source.denied = !session_opened && session_opened.error().code() == ErrorCode::kDenied;
  CO_TRY(source.session, std::move(session_opened));
  const PeerSession session = *source.session;
  slices_->set_regions(index, session.regions);
  std::optional<Error> last_error;
  for (const auto& offer : session.offers) {
    const auto opened = co_await open_offer(source, index, session, offer);
    if (opened) co_return Result<void>();
    last_error = opened.error();
    warn_of_fallback(source, offer.transport, *last_error);
  }
  if (last_error) co_return fail(std::move(*last_error));
  co_return fail(ErrorCode::kUnavailable, "source {} offers no transport that this side can use{}",
                 source.name,
                 forced_transport_.empty() ? "" : " (--transport " + forced_transport_ + ")");
}

// Shown once per transport and pull: what is wrong with a fabric is wrong with it for every source.
// A transport that was asked for has nothing to fall back to: the source is lost.
void Transfer::warn_of_fallback(const ActiveSource& source, const std::string& transport,
                                const Error& cause) {
  const bool another = forced_transport_.empty() && transport != "tcp";
  if (!another || !hooks_.first_failure_of || !hooks_.first_failure_of(transport)) {
    log::info("pull.transport_failed", "source", source.name, "transport", transport, "error",
              cause.message());
    return;
  }
  log::warn("pull.transport_failed", "source", source.name, "transport", transport, "error",
            cause.message());
  if (!hooks_.note) return;
  hooks_.note(fmt::format("{} to {} does not work, trying the next transport: {}", transport,
                          source.name, cause.message()));
}

async::Task<Result<void>> Transfer::open_offer(ActiveSource& source, SourceIndex index,
                                               const PeerSession& session,
                                               const PeerSession::Offer& offer) {
  if (handshake_connector(offer.transport) != nullptr) {
    CO_TRY(auto paths, co_await shake_hands(index, offer, {}));
    source.transport = offer.transport;
    source.used.insert(offer.transport);
    add_paths(index, std::move(paths));
    co_return Result<void>();
  }
  const auto found = std::find_if(
      environment_.connectors.begin(), environment_.connectors.end(),
      [&](const transport::Connector* c) { return c->transport() == offer.transport; });
  if (found == environment_.connectors.end()) {
    co_return fail(ErrorCode::kUnavailable, "{} is not compiled in here", offer.transport);
  }
  const transport::PathTarget target{offer.transport, offer.endpoint, session.token,
                                     source.peer->incarnation()};
  const std::uint32_t wanted = std::clamp(offer.max_paths, 1u, kPathsPerSource);
  const TimePoint now = std::chrono::steady_clock::now();
  const TimePoint deadline = now + silence_.at_most(kConnectDeadline, now);
  // Named, not a temporary: g++ 12 destroys captures of a temporary inside co_await twice.
  auto work = [connector = *found, &target, wanted, deadline] {
    return std::make_shared<MadePaths>(make_paths(*connector, target, wanted, deadline));
  };
  auto made = co_await async::offload(*environment_.blocking_pool, std::move(work));
  if (made->paths.empty()) co_return fail(std::move(*made->error));
  source.transport = offer.transport;
  add_paths(index, std::move(made->paths));
  co_return Result<void>();
}

void Transfer::open_local(ActiveSource& source, SourceIndex index) {
  source.transport = "local";
  std::vector<transport::RegionKey> keys;
  for (std::uint32_t i = 0; i < source.local_segments.size(); ++i) keys.push_back({i, 0});
  slices_->set_regions(index, std::move(keys));
  transport::Paths paths;
  paths.push_back(
      std::make_unique<MemoryPath>(source.name, source.local_segments, source.keep_alive));
  add_paths(index, std::move(paths));
}

void Transfer::add_paths(SourceIndex index, transport::Paths paths) {
  ++additions_;
  batch_->add_paths(index, std::move(paths));
}

async::Task<void> Transfer::close_sessions() {
  std::vector<async::Task<void>> closes;
  for (auto& source : sources_) {
    if (source.peer == nullptr || !source.session || source.lost) continue;
    auto close = SourcePeer::close_session(source.peer, source.session->token);
    if (source.slow) {  // nobody waits for it
      boost::asio::co_spawn(environment_.executor, std::move(close), boost::asio::detached);
    } else {
      closes.push_back(std::move(close));
    }
    source.session.reset();
  }
  co_await async::run_all(std::move(closes));
}

}  // namespace rekindle::pull
